"""How many cores this process may use: fewer than the machine has where an affinity or a container's quota says so."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """At least one. A part of a core does not count: a thread that is throttled keeps all that wait for it."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """Cores that the control groups of this process allow it, the least of all levels; None if there is no limit."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    groups_of = (line.split(":", 2)[1:] for line in lines)
    folders = [folder for names, path in groups_of for folder in _folders(mount, names.split(","), path)]
    return min((limit for folder in folders if (limit := _limit(folder)) is not None), default=None)


def _folders(mount: Path, controllers: list[str], path: str) -> list[Path]:
    """Of the group and all above it. In a container the path may be that outside of it, and only the mount exists."""
    if controllers == [""]:
        roots = [mount, mount / "unified"]
    elif "cpu" in controllers:
        roots = [mount / "cpu", mount / ",".join(controllers)]
    else:
        return []
    parts = [part for part in path.split("/") if part]
    return [root.joinpath(*parts[:depth]) for root in roots for depth in range(len(parts) + 1)]


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
