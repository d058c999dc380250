"""Entry point of every worker process.

The first message says which role the worker has. A worker that fails reports the reason before it ends; the supervisor
decides whether it is restarted.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import msgspec

from dora_rl.core.errors import NonFiniteError, UserError
from dora_rl.core.types import Nanoseconds
from dora_rl.runtime import logs
from dora_rl.runtime.run_dir import parse
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.data_plane import DataPlane, LocalDataPlane
from dora_rl.runtime.transport.messages import StartWorker, ToWorker, WorkerFailed

logger = logging.getLogger(__name__)


def main(link: socket.socket) -> None:
    """Run a worker of this machine until the supervisor stops it or is gone, then end the process."""
    run_worker(link, LocalDataPlane())
    # Threads of libraries must not keep the process alive after its role has ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_worker(link: socket.socket, data_plane: DataPlane, clock_offset: Nanoseconds = 0) -> None:
    """Serve one role until the supervisor stops it or is gone.

    `clock_offset` is by how much the monotonic clock of this machine is ahead of that of the supervisor's machine.
    """
    channel: Channel[ToWorker] = Channel(link, ToWorker, "supervisor")  # type: ignore[arg-type]
    messages: list[ToWorker] = []
    while not messages and not channel.closed:
        channel.wait(60.0)
        messages = channel.receive()
    if messages:
        start, *rest = messages
        assert isinstance(start, StartWorker), "the first message is StartWorker"
        try:
            logs.configure(parse(start.config).logging.level)
            logger.info("started %s worker %s: pid %d, %d threads", start.role, start.name, os.getpid(), start.threads)
            local = msgspec.structs.replace(start, origin=start.origin + clock_offset)
            _serve(local, channel, rest, data_plane)
            logger.info("stopped")
        except UserError as error:
            logger.error("%s", error)
            channel.send(WorkerFailed(reason=str(error), by_user=True))
        except NonFiniteError as error:
            logger.error("%s", error)
            channel.send(WorkerFailed(reason=str(error), final=True))
        except Exception as error:
            logger.exception("the worker failed")
            channel.send(WorkerFailed(reason=f"{type(error).__name__}: {error}"))
    while channel.pending and not channel.closed:
        channel.wait(1.0)


def _serve(start: StartWorker, channel: Channel[ToWorker], messages: list[ToWorker], data_plane: DataPlane) -> None:
    match start.role:
        case "instance":
            from dora_rl.runtime.workers.rollout import RolloutWorker

            RolloutWorker(start, channel, data_plane).serve(messages)
        case "trainer" | "rank":
            from dora_rl.runtime.workers.trainer import TrainerWorker

            TrainerWorker(start, channel, data_plane.address).serve(messages)
        case "reward":
            from dora_rl.runtime.workers.reward import serve

            serve(start, channel, messages)
        case other:
            raise AssertionError(f"no such role: {other}")
