"""The beginning of every process of a run.

The first message says which role it plays. A process that fails says why before it goes; the supervisor decides what
becomes of it.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

import msgspec

from dora_rl.core.errors import NonFiniteError, UserError
from dora_rl.core.nouns import Nanoseconds
from dora_rl.runtime.carriage import Carriage, LocalCarriage
from dora_rl.runtime.channel import Channel
from dora_rl.runtime.messages import Died, Start, ToProcess


def main(link: socket.socket) -> None:
    """Play a role until told to stop, or alone; the process ends with it."""
    play(link, LocalCarriage())
    # Threads of libraries must not keep a process alive that has nothing more to say.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def play(link: socket.socket, carriage: Carriage, ahead: Nanoseconds = 0) -> None:
    """Play a role until told to stop, or alone; `ahead` is how much later it is here by the machine's clock."""
    channel: Channel[ToProcess] = Channel(link, ToProcess)  # type: ignore[arg-type]
    messages: list[ToProcess] = []
    while not messages and not channel.closed:
        channel.wait(60.0)
        messages = channel.receive()
    if messages:
        start, *rest = messages
        assert isinstance(start, Start), "the first message says who we are"
        try:
            here = msgspec.structs.replace(start, origin=start.origin + ahead)
            _play(here, channel, rest, carriage)
        except UserError as error:
            channel.send(Died(reason=str(error), by_user=True))
        except NonFiniteError as error:
            channel.send(Died(reason=str(error), final=True))
        except Exception as error:
            traceback.print_exc()
            channel.send(Died(reason=f"{type(error).__name__}: {error}"))
    while channel.pending and not channel.closed:
        channel.wait(1.0)


def _play(start: Start, channel: Channel[ToProcess], messages: list[ToProcess], carriage: Carriage) -> None:
    match start.role:
        case "instance":
            from dora_rl.runtime.instance import Instance

            Instance(start, channel, carriage).serve(messages)
        case "trainer" | "rank":
            from dora_rl.runtime.trainer import TrainerProcess

            TrainerProcess(start, channel, carriage.address).serve(messages)
        case "judge":
            from dora_rl.runtime.judge import serve

            serve(start, channel, messages)
        case other:
            raise AssertionError(f"no such role: {other}")
