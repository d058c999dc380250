"""The machine, commit and package versions of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IDLE = 0.5
"""The load average below which a machine counts as idle."""
PACKAGES = ("torch", "transformers", "numpy", "pydantic", "msgspec")


def git(*arguments: str) -> str:
    """The output of a git command; empty outside of a repository."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else ""


def describe() -> dict[str, Any]:
    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py", "benchmarks/peers", "benchmarks/jobs")
    return {
        "commit": git("rev-parse", "--short", "HEAD") + (" with changes" if changed else ""),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def processor() -> str:
    """Name of the processor and its widest vector extension."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = found.get("flags", "").split()
    widest = next((name for name in ("amx_tile", "avx512f", "avx2") if name in flags), "")
    return f"{found.get('model name', platform.processor())} {widest}".strip()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (ValueError, OSError):
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
