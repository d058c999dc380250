"""`dora_rl.Orchestrator`: the state machine that takes every decision of a run, with settings as keywords."""

from __future__ import annotations

from typing import Any

from dora_rl.core.config import build, merge
from dora_rl.orchestrator import orchestrator
from dora_rl.orchestrator.config import ControlConfig


class Orchestrator(orchestrator.Orchestrator):
    """The decisions of one run: `step(event, now)` takes an event of `dora_rl.events` and returns commands of
    `dora_rl.commands`.

    It has no clock, no I/O and no randomness: the same events at the same times give the same commands. `settings` are
    those of the section `control` of a config: `Orchestrator(groups_per_step=8, group_size=4, ...)`. Times are integer
    nanoseconds.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(build(ControlConfig, merge({}, settings), "orchestrator"))
