"""A worker process of a run as a Ray actor: it connects to its supervisor and serves its role.

Invariants:
- the role is served in the main thread, since rewards may use signals; the actor does nothing else;
- the actor's process ends with the role, and with the supervisor, which owns the actor;
- a reward worker runs user code, so it is a separate process below a reaper, which kills everything that it has started
  when the actor ends, for whatever reason. Other roles use Ray and so stay in the actor's process; what their libraries
  have started is killed when the role ends, and by Ray if the actor is killed.
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
from dora_rl.runtime.launch.fork_server import worker_environment
from dora_rl.runtime.launch.reaper import KILL_SECONDS


class WorkerActor:
    """The actor."""

    def __init__(self, supervisor: Any, role: str, token: bytes, log: str) -> None:
        self._role = role
        os.environ.update(worker_environment(os.environ))  # before torch is imported
        self._supervisor = supervisor
        self._token = token
        with contextlib.suppress(OSError):  # on a node without the run directory the output stays in Ray's logs
            _redirect_output(Path(log))

    def serve(self) -> None:
        """Serve the role until it ends; does not return."""
        import ray

        from dora_rl.runtime.launch.ray.object_store import RayDataPlane
        from dora_rl.runtime.launch.ray.rendezvous import connect
        from dora_rl.runtime.workers.main import run_worker

        here = ray.util.get_node_ip_address()
        address, port = ray.get(self._supervisor.rendezvous_address.remote(here))
        node = ray.get_runtime_context().get_node_id()
        link, clock_offset = connect(address, port, self._token, node)
        if self._role == "reward":
            _run_in_subprocess(link, clock_offset)
        else:
            run_worker(link, RayDataPlane(self._supervisor), clock_offset)
            end_descendants(KILL_SECONDS)
        ray.actor.exit_actor()


def _run_in_subprocess(link: socket.socket, clock_offset: Nanoseconds) -> None:
    """Run the worker in a process below a reaper, and wait until it ends."""
    arguments = [str(link.fileno()), str(os.getpid()), str(clock_offset)]
    command = [sys.executable, "-m", "dora_rl.runtime.launch.reaper", *arguments]
    process = subprocess.Popen(command, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603
    link.close()
    process.wait()


def _redirect_output(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
