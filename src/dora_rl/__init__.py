"""dora-rl: reinforcement learning for language models with several policy versions live at once.

The names of the Python API are imported when they are first used, so that `import dora_rl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora_rl.api.callbacks import STOP, Callback, StopTraining
    from dora_rl.api.config import DoraConfig
    from dora_rl.api.run import AuditResult, Run
    from dora_rl.api.training import train
    from dora_rl.core.errors import ConfigError, DoraError, IntegrityError, RunError, UserError

__version__ = "0.1.0"

__all__ = [
    "STOP",
    "AuditResult",
    "Callback",
    "ConfigError",
    "DoraConfig",
    "DoraError",
    "IntegrityError",
    "Run",
    "RunError",
    "StopTraining",
    "UserError",
    "__version__",
    "train",
]

_HOMES = {
    "STOP": "dora_rl.api.callbacks",
    "AuditResult": "dora_rl.api.run",
    "Callback": "dora_rl.api.callbacks",
    "ConfigError": "dora_rl.core.errors",
    "DoraConfig": "dora_rl.api.config",
    "DoraError": "dora_rl.core.errors",
    "IntegrityError": "dora_rl.core.errors",
    "Run": "dora_rl.api.run",
    "RunError": "dora_rl.core.errors",
    "StopTraining": "dora_rl.api.callbacks",
    "UserError": "dora_rl.core.errors",
    "train": "dora_rl.api.training",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dora_rl' has no attribute '{name}'")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
