"""Processes of this machine: whether one is alive, and the end of all that descend from one.

On Linux a process can be made the one that its orphaned descendants are given to (`adopt_orphans`), so that nothing
that descends from it can leave its tree: not by a session of its own (`setsid`), not by a second fork. Other systems
have no such thing: there `descendants` knows nobody, and only process groups can be ended as a whole.
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
    """It runs or is stopped. One that has ended and that nobody has buried yet has a number, but is not alive."""
    try:
        os.kill(pid, 0)
        state = _STATE.match(Path(f"/proc/{pid}/stat").read_bytes())
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    except OSError:
        return not Path("/proc/self").exists()  # no such folder on other systems
    return state is not None and state[1] not in b"ZX"


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the parent ends, even in the middle of a long computation; leave at once if it has ended."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """From now on descendants of this process whose own parent ends become its children; on Linux only."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> set[int]:
    """Processes that descend from this one, without those that have ended; nobody where there is no `/proc`."""
    return set(_below(pid, _table(), ()))


def end_descendants(seconds: float, spared: Collection[int] = ()) -> bool:
    """Kill all that descend from this process, but children that are spared, as often as new ones are found.

    False if some are left after so many seconds. A process that does not adopt orphans loses sight of those whose
    parent was killed first.
    """
    end = time.monotonic() + seconds
    while found := _below(os.getpid(), _table(), spared):
        for one, started in found.items():
            _kill(one, started)
        _bury()
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
    """All processes that have not ended: their parents, and when they started, which tells two of one number apart."""
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
    """Kill that very process: its number may be another's by now."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        handle = os.pidfd_open(pid)
        try:
            stat = _stat(pid)
            if stat is not None and stat[1] == started:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _bury() -> None:
    """Take note of children of this process that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
