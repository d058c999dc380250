"""Where processes come from: one process that has everything imported and forks whoever is asked for.

Importing torch and transformers takes seconds of a core; a fork takes milliseconds and shares the memory. So a run
starts quickly, and a process that was lost is back at once.

Invariants:
- the nursery computes nothing and has one thread, so that a fork of it is a whole process;
- it ends with its supervisor, and its children with it;
- one that is gone or hangs is replaced; its children are lost with it, which the supervisor handles as any loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

from dora_rl.core.errors import RunError

_PR_SET_PDEATHSIG = 1
_PID = struct.Struct("<I")
_TRIES = 3
_IMPORTS = ("dora_rl.runtime.instance", "dora_rl.runtime.trainer", "dora_rl.runtime.judge", "peft")
ENVIRONMENT = {
    # Threads that spin on while they wait would take the cores from the other processes; those that sleep at once would
    # be woken hundreds of times in a step of a small model, which costs as much as a second core brings.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


class Nursery:
    """The supervisor's end."""

    patience = 120.0
    """Seconds for an answer, importing included."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._link, self.pid = self._begin()

    def fork(self, link: socket.socket, log: IO[bytes]) -> int:
        """A process that speaks over `link` and prints to `log`; its process id, which is that of its group too."""
        for _ in range(_TRIES):
            try:
                socket.send_fds(self._link, [b"f"], [link.fileno(), log.fileno()])
                answer = self._link.recv(_PID.size)
            except OSError:  # a timeout is one too
                answer = b""
            if len(answer) == _PID.size:
                (pid,) = _PID.unpack(answer)
                return int(pid)
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
                [sys.executable, "-m", "dora_rl.runtime.nursery", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
            )
        return ours, self._process.pid

    def _end(self, patience: float) -> None:
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        self._process.kill()
        self._process.wait()


def end_with_parent(parent: int) -> None:
    """Not to outlive the parent, even in the middle of a long computation: what it does would count for nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(link: socket.socket, parent: int) -> None:
    """Fork whoever is asked for, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the dead
    end_with_parent(parent)
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while True:
        asked, fds, _, _ = socket.recv_fds(link, 1, 2)
        if not asked:
            return
        nursery = os.getpid()
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            link.close()
            os.close(ready)
            _become_child(nursery, told, *fds)
        for fd in (told, *fds):
            os.close(fd)
        os.read(ready, 1)  # ends when the child will end with us: nobody knows it before, so nobody can stop it before
        os.close(ready)
        link.sendall(_PID.pack(pid))


def _become_child(nursery: int, told: int, link: int, log: int) -> None:
    from dora_rl.runtime.child import main as child

    end_with_parent(nursery)
    os.close(told)
    os.setpgid(0, 0)  # a group of its own to be killed by, in one session: niceness counts only within one
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        child(socket.socket(fileno=link))
    finally:
        os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
