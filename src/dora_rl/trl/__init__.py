"""`GRPOTrainer` and `GRPOConfig` with the signatures of TRL: a script changes one import (docs/from-trl.md).

The names are imported when they are first used, so that a config can be made without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora_rl.trl.config import GRPOConfig
    from dora_rl.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

_HOMES = {"GRPOConfig": "dora_rl.trl.config", "GRPOTrainer": "dora_rl.trl.trainer"}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dora_rl.trl' has no attribute '{name}'")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
