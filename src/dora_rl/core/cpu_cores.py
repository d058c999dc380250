"""How many CPU cores this process may use, given its CPU affinity and the quota of its container."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of whole cores, at least one.

    A fraction of a core does not count: a throttled thread delays every thread that waits for it.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """The CPU quota in cores, the lowest of all cgroup levels of this process; None if there is no limit."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    entries = (line.split(":", 2)[1:] for line in lines)
    folders = [folder for names, path in entries for folder in _folders(mount, names.split(","), path)]
    return min((limit for folder in folders if (limit := _limit(folder)) is not None), default=None)


def _folders(mount: Path, controllers: list[str], path: str) -> list[Path]:
    """Folders of a cgroup and of all its ancestors.

    Inside a container the path may be the one outside of it, and then only the mount point exists.
    """
    if controllers == [""]:
        roots = [mount, mount / "unified"]
    elif "cpu" in controllers:
        roots = [mount / "cpu", mount / ",".join(controllers)]
    else:
        return []
    names = [name for name in path.split("/") if name]
    return [root.joinpath(*names[:depth]) for root in roots for depth in range(len(names) + 1)]


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
