"""A judge in a process of its own: reward functions may hang, crash or print; here that harms nobody."""

from __future__ import annotations

from dora_rl.envs.rewards import Judge
from dora_rl.runtime import messages as m
from dora_rl.runtime.channel import Channel
from dora_rl.runtime.folder import RunFolder


def serve(start: m.Start, channel: Channel[m.ToProcess], messages: list[m.ToProcess]) -> None:
    """Until told to stop, or alone."""
    folder = RunFolder.open(start.folder)
    judge = Judge(folder.parse(start.config).reward, folder.base())
    channel.send(m.Ready())
    while True:
        for message in messages:
            if isinstance(message, m.Stop):
                return
            assert isinstance(message, m.Judge), f"not for a judge: {message}"
            verdict = judge.score(message.problem, message.completion, message.tokens)
            channel.send(m.Judged(item=message.item, reward=verdict.reward, parts=verdict.parts, failed=verdict.failed))
        if channel.closed:
            return
        channel.wait(60.0)
        messages = channel.receive()
