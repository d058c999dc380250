"""Whether the packages of the extra `train` are installed."""

from __future__ import annotations

import importlib.util

from dora_rl.core.errors import UserError

INSTALL = "this command requires torch and transformers: pip install 'dora-rl[train]'"


def need_packages() -> None:
    """Raise a `UserError` without torch and transformers; neither is imported."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise UserError(INSTALL)
