"""The fork server: one process that has imported everything and forks the workers of a run.

Importing torch and transformers takes seconds of CPU time; a fork takes milliseconds and shares the memory. So a run
starts quickly, and a worker that was lost is back at once.

Invariants:
- the fork server computes nothing and has one thread, so that a fork of it is a complete process;
- it ends with its supervisor, and its children end with it;
- between it and each worker that it forks is a reaper, which kills everything that the worker has started when the
  worker ends;
- a fork server that is gone or hangs is replaced; its workers are lost with it, which the supervisor handles like any
  other loss.

This is written by hand since the forkserver of `multiprocessing` gives a child neither a reaper nor its own log, leaves
its children running when the parent is killed, is not replaced when it hangs, and passes the child's target by pickle.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from dora_rl.core.errors import RunError
from dora_rl.core.os_processes import adopt_orphans, alive, end_descendants, end_with_parent
from dora_rl.runtime.launch.reaper import KILL_SECONDS, run_with_reaper

logger = logging.getLogger(__name__)

_PIDS = struct.Struct("<II")
_PID = struct.Struct("<I")
_ATTEMPTS = 3
_IMPORTS = (
    "dora_rl.runtime.workers.rollout",
    "dora_rl.runtime.workers.trainer",
    "dora_rl.runtime.workers.reward",
    "peft",
)
_THREAD_WAITING = {
    # Threads spin for about a millisecond, then sleep. Where cores are contended they do not spin at all
    # (`runtime.workers.thread_spinning`).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Forked(NamedTuple):
    """A forked worker."""

    pid: int
    """Id of the process, and of its process group."""
    reaper: int
    """Process id of its reaper."""


class ForkServer:
    """The supervisor's side: starts a fork server and asks it for processes."""

    timeout = 120.0
    """Seconds for an answer, importing included."""

    def __init__(self, log: Path | None) -> None:
        """Start a fork server; without a log it can be started before there is a run directory."""
        self._log = log or Path(os.devnull)
        self._link, self.pid = self._start()

    def with_log(self, log: Path) -> ForkServer:
        """Set the log of a replacement: the server that runs keeps the one that it was started with."""
        self._log = log
        return self

    def fork(self, link: socket.socket, log: IO[bytes]) -> Forked:
        """Fork a worker whose channel is `link` and whose output goes to `log`."""
        for _ in range(_ATTEMPTS):
            try:
                socket.send_fds(self._link, [b"f"], [link.fileno(), log.fileno()])
                answer = self._link.recv(_PIDS.size)
            except OSError:  # a timeout is one too
                answer = b""
            if len(answer) == _PIDS.size:
                return Forked(*_PIDS.unpack(answer))
            logger.warning("the fork server (pid %d) does not answer and is replaced", self.pid)
            self._stop(0.0)
            self._link, self.pid = self._start()
        raise RunError(f"no process can be started; see {self._log}, then resume the run")

    def close(self) -> None:
        self._stop(5.0)

    def _start(self) -> tuple[socket.socket, int]:
        """Start a fork server; returns the link to it and its process id."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.timeout)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "dora_rl.runtime.launch.fork_server", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | worker_environment(os.environ),
                start_new_session=True,
            )
        return ours, self._process.pid

    def _stop(self, seconds: float) -> None:
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        self._process.kill()
        self._process.wait()


def worker_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that imports torch. A user's own settings of how threads wait are kept."""
    return _QUIET | ({} if _THREAD_WAITING.keys() & given.keys() else _THREAD_WAITING)


def serve(link: socket.socket, parent: int) -> None:
    """Fork a worker for each request, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children that have ended
    adopt_orphans()
    end_with_parent(parent)
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    reapers: set[int] = set()
    while True:
        request, fds, _, _ = socket.recv_fds(link, 1, 2)
        # If a reaper was killed, the fork server adopts what its worker has started, and no other process would end it.
        reapers = {reaper for reaper in reapers if request and alive(reaper)}
        end_descendants(KILL_SECONDS, reapers)
        if not request:
            return
        forked = _fork(link, *fds)
        reapers.add(forked.reaper)
        link.sendall(_PIDS.pack(*forked))


def _fork(link: socket.socket, worker_link: int, log: int) -> Forked:
    server = os.getpid()
    read_end, write_end = os.pipe()
    reaper = os.fork()
    if reaper == 0:
        link.close()
        os.close(read_end)
        run_with_reaper(server, lambda: _run_worker(write_end, worker_link, log))
    for fd in (write_end, worker_link, log):
        os.close(fd)
    # The worker sends its pid once it will end with its reaper. Before that its pid is unknown, so it can't be stopped.
    data = os.read(read_end, _PID.size)
    os.close(read_end)
    return Forked(_PID.unpack(data)[0] if len(data) == _PID.size else reaper, reaper)


def _run_worker(pid_pipe: int, link: int, log: int) -> None:
    from dora_rl.runtime.workers.main import main

    os.write(pid_pipe, _PID.pack(os.getpid()))
    os.close(pid_pipe)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    main(socket.socket(fileno=link))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
