"""The parent of a worker process: it waits until the worker ends, then kills everything that the worker has started.

    fork server (or Ray actor) -> reaper -> worker -> whatever rewards, environments and libraries start

Invariants:
- every descendant of the worker stays below the reaper, even after `setsid` or a second fork: the reaper adopts orphans
  and reaps them;
- when the worker has ended, for whatever reason, all its descendants are killed; then the reaper ends. So when the
  reaper is gone, nothing is left;
- the reaper kills the worker when its own parent is gone; a reaper that is killed takes the worker with it, and the
  fork server adopts what the worker had started;
- a reaper runs no user code and computes nothing.

Systems other than Linux can't adopt orphans: there the worker and its process group are killed, and a descendant that
has left the group survives.
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

KILL_SECONDS = 10.0
"""Time for killed processes to be gone: one that waits for a disk in the kernel takes that long."""
SIGNAL_BASE = 128
"""Added to the number of a signal in the exit status, as shells do."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


def run_with_reaper(parent: int, target: Callable[[], None]) -> None:
    """Become the reaper of a forked process that runs `target`; does not return, and exits as that process did."""
    gc.disable()  # it would only copy memory that is shared with the parent
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    adopt_orphans()
    end_with_parent(parent, signal.SIGTERM)
    reaper = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(reaper)
        os.setpgid(0, 0)  # its own group can be killed as a whole; the session stays: niceness counts only within one
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        gc.enable()
        try:
            target()
        finally:
            os._exit(1)
    _close_descriptors()
    status = None
    while (status := _exit_status(pid)) is None and os.getppid() == parent:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            break
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    end_descendants(KILL_SECONDS)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNAL_BASE - code)


def _exit_status(pid: int) -> int | None:
    """Reap all processes that have ended; return the exit status of this one if it is among them."""
    while True:
        reaped, status = os.waitpid(-1, os.WNOHANG)
        if reaped == pid:
            return status
        if not reaped:
            return None


def _close_descriptors() -> None:
    """The end of a channel is noticed only if no other process has it open."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    from dora_rl.runtime.transport.data_plane import LocalDataPlane
    from dora_rl.runtime.workers.main import run_worker

    _link = socket.socket(fileno=int(sys.argv[1]))
    run_with_reaper(int(sys.argv[2]), lambda: run_worker(_link, LocalDataPlane(), int(sys.argv[3])))
