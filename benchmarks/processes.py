"""Memory and processor time of a process and its descendants; shared pages count once."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_EVERY = 0.5
"""Seconds between two samples: reading the memory of a large process takes milliseconds."""


def tree(root: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def memory(pid: int) -> int:
    """Bytes of a process; a page that n processes share counts as 1/n."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return 0


def processor_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK
    return 0.0


def role(pid: int, root: int) -> str:
    """`supervisor` for the root, otherwise the name of the log that a worker writes to: `trainer`, `i0`, ..."""
    if pid == root:
        return "supervisor"
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/fd/1").readlink().stem
    return ""


class Watch:
    """Samples a tree of processes until the context ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peak = 0
        """Peak of the total bytes."""
        self.samples: list[dict[str, float]] = []
        """Processor time by role, at each sample."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_EVERY):
            pids = tree(self._pid)
            self.peak = max(self.peak, sum(map(memory, pids)))
            self.samples.append({role(pid, self._pid): processor_seconds(pid) for pid in pids})

    def spent(self, since: str) -> dict[str, float]:
        """Processor time by role, from the first sample that has the role `since` to the last one."""
        seen = [sample for sample in self.samples if since in sample]
        if not seen:
            return {}
        last = {name: max(sample.get(name, 0.0) for sample in seen) for name in set().union(*seen)}
        return {name: seconds - seen[0].get(name, 0.0) for name, seconds in sorted(last.items())}
