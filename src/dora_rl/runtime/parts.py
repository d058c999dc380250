"""What hearing, doing and noting have in common: the parts of one run, wired by the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dora_rl.core import events as e
from dora_rl.core.nouns import Nanoseconds, Version
from dora_rl.runtime.books import Books
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.crew import Crew
from dora_rl.runtime.judges import Judges
from dora_rl.runtime.processes import Process, Processes
from dora_rl.runtime.recorder import Recorder
from dora_rl.runtime.text import Text

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.evaluation import Evaluation
    from dora_rl.weights.store import WeightStore


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts."""

    config: RunConfig
    books: Books
    ledger: Ledger
    store: WeightStore
    recorder: Recorder
    text: Text
    processes: Processes
    crew: Crew
    judges: Judges
    notice: Callable[[str], None]
    """Says a sentence to whoever looks on."""
    happen: Callable[[e.Event], None]
    """Tells the orchestrator, in its turn."""
    lost: Callable[[Process, str], None]
    """A process has ended, or is to end, without being asked to."""
    now: Callable[[], Nanoseconds]
    """The run's clock."""
    evaluation: Evaluation | None = None
    newest: Version | None = None
