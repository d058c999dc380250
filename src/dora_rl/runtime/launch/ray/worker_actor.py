"""A process of a run in a Ray actor: it knocks at its supervisor's door and plays its role.

Invariants:
- the role is played in the main thread, since rewards may use signals; nothing else is asked of the actor;
- the actor's process ends with the role, and with the supervisor, which owns the actor;
- a judge runs the code of users, so it is a process of its own below a keeper, which ends all that it has started when
  the actor ends, however that comes about. Other roles speak to Ray and so stay in the actor's process; what their
  libraries have started is ended with the role, and by Ray if the actor is killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from dora_rl.core.os_processes import end_descendants
from dora_rl.core.types import Nanoseconds
from dora_rl.runtime.launch.fork_server import variables
from dora_rl.runtime.launch.reaper import PATIENCE


class WorkerActor:
    """The actor."""

    def __init__(self, supervisor: Any, role: str, token: bytes, log: str) -> None:
        self._role = role
        os.environ.update(variables(os.environ))  # before torch is imported
        self._supervisor = supervisor
        self._token = token
        with contextlib.suppress(OSError):  # a node that does not have the run's folder keeps what is printed itself
            _print_to(Path(log))

    def serve(self) -> None:
        """Until the role is over; does not return then."""
        import ray

        from dora_rl.runtime.launch.ray.object_store import RayDataPlane
        from dora_rl.runtime.launch.ray.rendezvous import enter
        from dora_rl.runtime.workers.main import play

        here = ray.util.get_node_ip_address()
        address, port = ray.get(self._supervisor.door.remote(here))
        node = ray.get_runtime_context().get_node_id()
        link, ahead = enter(address, port, self._token, node)
        if self._role == "reward":
            _play_apart(link, ahead)
        else:
            play(link, RayDataPlane(self._supervisor), ahead)
            end_descendants(PATIENCE)
        ray.actor.exit_actor()


def _play_apart(link: socket.socket, ahead: Nanoseconds) -> None:
    """Play the role in a process of its own, below a keeper, and wait for its end."""
    command = [sys.executable, "-m", "dora_rl.runtime.launch.reaper", str(link.fileno()), str(os.getpid()), str(ahead)]
    process = subprocess.Popen(command, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603
    link.close()
    process.wait()


def _print_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
