"""The parent of a process of a run: it waits for its end, and then ends all that the process has started.

    nursery (or Ray actor) -> keeper -> process of the run -> whatever rewards, environments and libraries start

Invariants:
- whatever descends from the process stays below the keeper, also after `setsid` or a second fork: the keeper adopts
  orphans and buries them;
- when the process has ended, however that came about, all its descendants are killed; then the keeper ends. So when the
  keeper is gone, nothing is left;
- the keeper ends the process when its own parent is gone; a keeper that is killed takes the process along, and what the
  process had started falls to the nursery;
- a keeper runs no code of users and computes nothing.

Systems other than Linux can't adopt orphans: there the process and its process group are ended, and a descendant that
has left the group lives on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

from dora_rl.core.os_processes import adopt_orphans, end_descendants, end_with_parent

PATIENCE = 10.0
"""Seconds for killed processes to be gone: one that waits in the kernel for a disk takes that long."""
BY_SIGNAL = 128
"""Added to a signal's number in the exit status, as shells have it."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


def keep(parent: int, become: Callable[[], None]) -> None:
    """Fork the process that runs `become`, wait for its end, end what is left of it, and end as it did."""
    gc.disable()  # it would only copy memory that is shared with the parent
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans()
    end_with_parent(parent, signal.SIGTERM)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(keeper)
        os.setpgid(0, 0)  # a group of its own to be killed by, in one session: niceness counts only within one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        gc.enable()
        try:
            become()
        finally:
            os._exit(1)
    _close_all()
    status = None
    while (status := _status(pid)) is None and os.getppid() == parent:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    end_descendants(PATIENCE)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else BY_SIGNAL - code)


def _status(pid: int) -> int | None:
    """Bury who has ended; how the process did, if it is among them."""
    while True:
        buried, status = os.waitpid(-1, os.WNOHANG)
        if buried == pid:
            return status
        if not buried:
            return None


def _close_all() -> None:
    """The end of a channel is noticed only if nobody else has it open."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    from dora_rl.runtime.transport.data_plane import LocalDataPlane
    from dora_rl.runtime.workers.main import play

    _link = socket.socket(fileno=int(sys.argv[1]))
    keep(int(sys.argv[2]), lambda: play(_link, LocalDataPlane(), int(sys.argv[3])))
