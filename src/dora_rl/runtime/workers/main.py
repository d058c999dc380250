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
from dora_rl.core.types import Nanoseconds
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.data_plane import DataPlane, LocalDataPlane
from dora_rl.runtime.transport.messages import StartWorker, ToWorker, WorkerFailed


def main(link: socket.socket) -> None:
    """Play a role until told to stop, or alone; the process ends with it."""
    play(link, LocalDataPlane())
    # Threads of libraries must not keep a process alive that has nothing more to say.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def play(link: socket.socket, carriage: DataPlane, ahead: Nanoseconds = 0) -> None:
    """Play a role until told to stop, or alone; `ahead` is how much later it is here by the machine's clock."""
    channel: Channel[ToWorker] = Channel(link, ToWorker)  # type: ignore[arg-type]
    messages: list[ToWorker] = []
    while not messages and not channel.closed:
        channel.wait(60.0)
        messages = channel.receive()
    if messages:
        start, *rest = messages
        assert isinstance(start, StartWorker), "the first message says who we are"
        try:
            here = msgspec.structs.replace(start, origin=start.origin + ahead)
            _play(here, channel, rest, carriage)
        except UserError as error:
            channel.send(WorkerFailed(reason=str(error), by_user=True))
        except NonFiniteError as error:
            channel.send(WorkerFailed(reason=str(error), final=True))
        except Exception as error:
            traceback.print_exc()
            channel.send(WorkerFailed(reason=f"{type(error).__name__}: {error}"))
    while channel.pending and not channel.closed:
        channel.wait(1.0)


def _play(start: StartWorker, channel: Channel[ToWorker], messages: list[ToWorker], carriage: DataPlane) -> None:
    match start.role:
        case "instance":
            from dora_rl.runtime.workers.rollout import RolloutWorker

            RolloutWorker(start, channel, carriage).serve(messages)
        case "trainer" | "rank":
            from dora_rl.runtime.workers.trainer import TrainerWorker

            TrainerWorker(start, channel, carriage.address).serve(messages)
        case "reward":
            from dora_rl.runtime.workers.reward import serve

            serve(start, channel, messages)
        case other:
            raise AssertionError(f"no such role: {other}")
