"""The reward worker: scores trajectories and steps environments in its own process.

User code may hang, crash or print; here it harms no other process. Rewards are computed one after the other in the main
thread, since they may use signals. With `reward.concurrency` above 1 rewards are computed in threads; with
`environment.concurrency` above 1 environments are stepped in threads, each session by one thread at a time.

A process that user code forks is not a reward worker: it has no channel, and ends when the user's function returns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dora_rl.core.types import TrajectoryId
from dora_rl.envs.environment import Environments, Session
from dora_rl.envs.rewards import RewardScorer
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import parse
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel

logger = logging.getLogger(__name__)


def serve(start: m.StartWorker, channel: Channel[m.ToWorker], messages: list[m.ToWorker]) -> None:
    """Serve until the supervisor says stop or is gone."""
    config, base = parse(start.config), Path(start.base)
    scorer = RewardScorer(config.reward, base)
    sessions = _Sessions(config, base, scorer) if config.environment.kind is not None else None
    concurrency = config.reward.concurrency if sessions is None else config.environment.concurrency
    pool = ThreadPoolExecutor(concurrency) if concurrency > 1 else None
    os.register_at_fork(after_in_child=channel.close)
    channel.send(m.WorkerReady())
    while True:
        for message in messages:
            match message:
                case m.StopWorker():
                    return
                case m.ScoreRequest():
                    if pool is None or sessions is not None:
                        channel.send(_score(scorer, message))
                    else:
                        pool.submit(_send_from_thread, partial(_score, scorer, message), channel)
                case m.EnvRequest():
                    assert sessions is not None
                    if pool is None or message.finish:
                        channel.send(sessions.play(message))
                    else:
                        pool.submit(_send_from_thread, partial(sessions.play, message), channel)
                case m.CloseSession(session=session):
                    assert sessions is not None
                    sessions.drop(session)
                case _:
                    raise AssertionError(f"not a message for a reward worker: {message}")
        if channel.closed:
            return
        channel.wait(60.0 if pool is None else 1.0)  # this also sends what a thread could not send at once
        messages = channel.receive()


def _score(scorer: RewardScorer, message: m.ScoreRequest) -> m.ScoreResult:
    result = scorer.score(message.problem, message.completion, message.tokens)
    return m.ScoreResult(
        item=message.item,
        reward=result.reward,
        components=result.components,
        notes=result.notes,
        failed=result.failed,
    )


def _send_from_thread(reply: Callable[[], m.EnvResult | m.ScoreResult], channel: Channel[m.ToWorker]) -> None:
    """Runs in a thread. An error that is ours, and not the user code's, ends the process, as in the main thread."""
    try:
        channel.send(reply())
    except BaseException:
        logger.exception("the reward worker failed")
        os._exit(1)


class _Sessions:
    """The environment sessions of this worker."""

    def __init__(self, config: RunConfig, base: Path, scorer: RewardScorer) -> None:
        functions = config.reward.functions
        self._environments = Environments(config.environment, base, scorer if functions else None)
        self._sessions: dict[TrajectoryId, Session] = {}

    def play(self, message: m.EnvRequest) -> m.EnvResult | m.ScoreResult:
        """Play one turn, or finish the session and return its result."""
        session = self._sessions.get(message.session)
        replayed: list[str] = []
        if session is None:
            session = self._sessions[message.session] = self._environments.begin(message.problem)
            replayed = _replay(session, message) if message.texts else []
        if message.finish:
            self._sessions.pop(message.session, None)
            result = session.result()
            return m.ScoreResult(
                item=message.item,
                reward=result.reward,
                components=result.components,
                notes=result.notes,
                failed=result.failed,
                replayed=tuple(replayed),
            )
        if not message.texts:
            return self._answer(message, session, _opening(session), replayed)
        if session.done:
            return self._answer(message, session, None, replayed)
        turn = session.step(message.texts[-1], message.tokens)
        return self._answer(message, session, turn.observation, replayed)

    def drop(self, number: TrajectoryId) -> None:
        """Close a session whose result is no longer needed."""
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()

    def _answer(
        self, message: m.EnvRequest, session: Session, observation: str | None, replayed: list[str]
    ) -> m.EnvResult:
        if session.failed is not None:
            self.drop(message.session)
        return m.EnvResult(
            item=message.item,
            observation=observation,
            done=session.done,
            replayed=tuple(replayed),
            failed=session.failed,
        )


def _replay(session: Session, message: m.EnvRequest) -> list[str]:
    """Give a new session all texts that the lost one was given; return its opening and its observations."""
    opening = _opening(session)
    observations = [] if opening is None else [opening]
    texts = message.texts if message.finish else message.texts[:-1]
    for number, text in enumerate(texts, start=1):
        if session.done:
            break
        last = message.finish and number == len(texts)
        turn = session.step(text, message.tokens if last else ())
        if turn.observation is not None:
            observations.append(turn.observation)
    return observations


def _opening(session: Session) -> str | None:
    if session.opening is None or isinstance(session.opening, str):
        return session.opening
    return "\n".join(message.content for message in session.opening)
