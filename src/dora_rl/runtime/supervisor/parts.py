"""What hearing, doing and noting have in common: the parts of one run, wired by the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_rl.core import events as e
from dora_rl.core.types import Nanoseconds, Version
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.crew import Crew
from dora_rl.runtime.supervisor.metrics_recorder import MetricsRecorder
from dora_rl.runtime.supervisor.reward_client import RewardClient
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
from dora_rl.runtime.tokenization import Tokenization

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.supervisor.evaluation import Evaluation
    from dora_rl.weights.store import WeightStore


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts."""

    config: RunConfig
    books: TrajectoryStore
    ledger: Ledger
    store: WeightStore
    recorder: MetricsRecorder
    text: Tokenization
    processes: ProcessManager
    crew: Crew
    judges: RewardClient
    notice: Callable[[str], None]
    """Says a sentence to whoever looks on."""
    happen: Callable[[e.Event], None]
    """Tells the orchestrator, in its turn."""
    lost: Callable[[WorkerProcess, str], None]
    """A process has ended, or is to end, without being asked to."""
    now: Callable[[], Nanoseconds]
    """The run's clock."""
    evaluation: Evaluation | None = None
    newest: Version | None = None
