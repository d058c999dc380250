"""dora-rl: reinforcement learning for language models with several policy versions live at once.

The names of the Python API are imported when they are first used, so that `import dora_rl` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora_rl import commands, events
    from dora_rl.api.callbacks import STOP, Callback, StopTraining
    from dora_rl.api.config import DoraConfig
    from dora_rl.api.engine import Engine
    from dora_rl.api.engine_driver import Completion
    from dora_rl.api.engine_session import EngineSession
    from dora_rl.api.ledger import Ledger
    from dora_rl.api.orchestrator import Orchestrator
    from dora_rl.api.run import AuditResult, Run
    from dora_rl.api.simulator import Comparison, SimulationResult, Simulator
    from dora_rl.api.training import train
    from dora_rl.core.errors import ConfigError, DoraError, IntegrityError, RunError, UserError
    from dora_rl.engine.requests import Sampling
    from dora_rl.ledger.reader import Conservation, GroupRow, StepRow, TrajectoryRow
    from dora_rl.ledger.writer import LoggedEvent

__version__ = "0.1.0"

__all__ = [
    "STOP",
    "AuditResult",
    "Callback",
    "Comparison",
    "Completion",
    "ConfigError",
    "Conservation",
    "DoraConfig",
    "DoraError",
    "Engine",
    "EngineSession",
    "GroupRow",
    "IntegrityError",
    "Ledger",
    "LoggedEvent",
    "Orchestrator",
    "Run",
    "RunError",
    "Sampling",
    "SimulationResult",
    "Simulator",
    "StepRow",
    "StopTraining",
    "TrajectoryRow",
    "UserError",
    "__version__",
    "commands",
    "events",
    "train",
]

_HOMES = {
    "STOP": "dora_rl.api.callbacks",
    "AuditResult": "dora_rl.api.run",
    "Callback": "dora_rl.api.callbacks",
    "Comparison": "dora_rl.api.simulator",
    "Completion": "dora_rl.api.engine_driver",
    "ConfigError": "dora_rl.core.errors",
    "Conservation": "dora_rl.ledger.reader",
    "DoraConfig": "dora_rl.api.config",
    "DoraError": "dora_rl.core.errors",
    "Engine": "dora_rl.api.engine",
    "EngineSession": "dora_rl.api.engine_session",
    "GroupRow": "dora_rl.ledger.reader",
    "IntegrityError": "dora_rl.core.errors",
    "Ledger": "dora_rl.api.ledger",
    "LoggedEvent": "dora_rl.ledger.writer",
    "Orchestrator": "dora_rl.api.orchestrator",
    "Run": "dora_rl.api.run",
    "RunError": "dora_rl.core.errors",
    "Sampling": "dora_rl.engine.requests",
    "SimulationResult": "dora_rl.api.simulator",
    "Simulator": "dora_rl.api.simulator",
    "StepRow": "dora_rl.ledger.reader",
    "StopTraining": "dora_rl.api.callbacks",
    "TrajectoryRow": "dora_rl.ledger.reader",
    "UserError": "dora_rl.core.errors",
    "commands": "dora_rl.commands",
    "events": "dora_rl.events",
    "train": "dora_rl.api.training",
}
"""The module of each name, or the module that the name stands for."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dora_rl' has no attribute '{name}'")
    home = importlib.import_module(_HOMES[name])
    found = home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
