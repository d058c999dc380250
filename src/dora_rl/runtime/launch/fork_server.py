"""Where processes come from: one process that has everything imported and forks whoever is asked for.

Importing torch and transformers takes seconds of a core; a fork takes milliseconds and shares the memory. So a run
starts quickly, and a process that was lost is back at once.

Invariants:
- the nursery computes nothing and has one thread, so that a fork of it is a whole process;
- it ends with its supervisor, and its children with it;
- between it and each process that it forks is a keeper, which ends all that the process has started when it ends;
- one that is gone or hangs is replaced; its children are lost with it, which the supervisor handles as any loss.
"""

from __future__ import annotations

import contextlib
import importlib
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
from dora_rl.runtime.launch.reaper import PATIENCE, keep

_PIDS = struct.Struct("<II")
_PID = struct.Struct("<I")
_TRIES = 3
_IMPORTS = (
    "dora_rl.runtime.workers.rollout",
    "dora_rl.runtime.workers.trainer",
    "dora_rl.runtime.workers.reward",
    "peft",
)
_WAITING = {
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
    """A process that was forked: its id, which is that of its process group too, and that of its keeper."""

    pid: int
    keeper: int


class ForkServer:
    """The supervisor's end."""

    patience = 120.0
    """Seconds for an answer, importing included."""

    def __init__(self, log: Path | None) -> None:
        """Begin one; without a log it can be begun before there is a run folder."""
        self._log = log or Path(os.devnull)
        self._link, self.pid = self._begin()

    def log_to(self, log: Path) -> ForkServer:
        """Say where one that is begun anew prints to."""
        self._log = log
        return self

    def fork(self, link: socket.socket, log: IO[bytes]) -> Forked:
        """A process that speaks over `link` and prints to `log`."""
        for _ in range(_TRIES):
            try:
                socket.send_fds(self._link, [b"f"], [link.fileno(), log.fileno()])
                answer = self._link.recv(_PIDS.size)
            except OSError:  # a timeout is one too
                answer = b""
            if len(answer) == _PIDS.size:
                return Forked(*_PIDS.unpack(answer))
            self._end(0.0)
            self._link, self.pid = self._begin()
        raise RunError(f"no process can be started; see {self._log}, then resume the run")

    def close(self) -> None:
        self._end(5.0)

    def _begin(self) -> tuple[socket.socket, int]:
        """A nursery, and the link to it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(self.patience)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "dora_rl.runtime.launch.fork_server", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | variables(os.environ),
                start_new_session=True,
            )
        return ours, self._process.pid

    def _end(self, patience: float) -> None:
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        self._process.kill()
        self._process.wait()


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a process that imports torch. A user's own settings of how threads wait are kept."""
    return _QUIET | ({} if _WAITING.keys() & given.keys() else _WAITING)


def serve(link: socket.socket, parent: int) -> None:
    """Fork whoever is asked for, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the dead
    adopt_orphans()
    end_with_parent(parent)
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    keepers: set[int] = set()
    while True:
        asked, fds, _, _ = socket.recv_fds(link, 1, 2)
        # What a process has started falls to the nursery if its keeper was killed: nobody else would end it.
        keepers = {keeper for keeper in keepers if asked and alive(keeper)}
        end_descendants(PATIENCE, keepers)
        if not asked:
            return
        forked = _fork(link, *fds)
        keepers.add(forked.keeper)
        link.sendall(_PIDS.pack(*forked))


def _fork(link: socket.socket, theirs: int, log: int) -> Forked:
    nursery = os.getpid()
    ready, told = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        link.close()
        os.close(ready)
        keep(nursery, lambda: _become_child(told, theirs, log))
    for fd in (told, theirs, log):
        os.close(fd)
    # The process says who it is when it will end with its keeper: nobody knows it before, so nobody can stop it before.
    said = os.read(ready, _PID.size)
    os.close(ready)
    return Forked(_PID.unpack(said)[0] if len(said) == _PID.size else keeper, keeper)


def _become_child(told: int, link: int, log: int) -> None:
    from dora_rl.runtime.workers.main import main as child

    os.write(told, _PID.pack(os.getpid()))
    os.close(told)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    child(socket.socket(fileno=link))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
