"""Operating system processes: whether one is alive, and how to end all descendants of one.

On Linux a process can become the subreaper of its orphaned descendants (`adopt_orphans`), so that no descendant can
leave its tree, neither with a new session (`setsid`) nor with a second fork. Other systems lack this: there
`descendants` finds none, and only process groups can be ended as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

_STATE = re.compile(rb".*\) (\w)", re.DOTALL)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAUSE = 0.002


def alive(pid: int) -> bool:
    """Whether the process runs or is stopped. A zombie still has a pid, but is not alive."""
    try:
        os.kill(pid, 0)
        state = _STATE.match(Path(f"/proc/{pid}/stat").read_bytes())
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OSError:
        return not Path("/proc/self").exists()  # other systems have no /proc
    return state is not None and state[1] not in b"ZX"


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Receive a signal when the parent ends, even during a long computation; exit at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, from now on (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Live descendants of a process; empty where there is no `/proc`."""
    return set(_below(pid, _table(), ()))


def end_descendants(seconds: float, spared: Collection[int] = ()) -> bool:
    """Kill all descendants of this process except the spared children, until no new ones are found.

    Return False if some are left after `seconds`. A process that does not adopt orphans can't find those descendants
    whose parent was killed first.
    """
    end = time.monotonic() + seconds
    while found := _below(os.getpid(), _table(), spared):
        for pid, started in found.items():
            _kill(pid, started)
        _reap()
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def _below(pid: int, table: dict[int, tuple[int, bytes]], spared: Collection[int]) -> dict[int, bytes]:
    by_parent: dict[int, list[int]] = {}
    for child, (parent, _) in table.items():
        by_parent.setdefault(parent, []).append(child)
    found: dict[int, bytes] = {}
    rest = [pid]
    while rest:
        for child in by_parent.get(rest.pop(), []):
            if child not in spared:
                found[child] = table[child][1]
                rest.append(child)
    return found


def _table() -> dict[int, tuple[int, bytes]]:
    """Parent and start time of every live process. The start time distinguishes two processes that reuse one pid."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            stat = _stat(int(entry.name)) if entry.name.isdigit() else None
            if stat is not None:
                found[int(entry.name)] = stat
    return found


def _stat(pid: int) -> tuple[int, bytes] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in b"ZX" else (int(fields[1]), fields[19])


def _kill(pid: int, started: bytes) -> None:
    """Kill exactly this process; its pid may have been reused."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        handle = os.pidfd_open(pid)
        try:
            stat = _stat(pid)
            if stat is not None and stat[1] == started:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _reap() -> None:
    """Collect children of this process that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
