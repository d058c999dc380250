"""Replaying an event log through a fresh orchestrator, which is then exactly where it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dora_rl.core.errors import IntegrityError
from dora_rl.ledger.writer import LoggedEvent
from dora_rl.orchestrator.orchestrator import Orchestrator


def replay(orchestrator: Orchestrator, log: Iterable[LoggedEvent]) -> Iterator[LoggedEvent]:
    """Each line once the orchestrator has answered it as it did then; `IntegrityError` if it answers otherwise."""
    for logged in log:
        if orchestrator.step(logged.event, logged.at) != logged.commands:
            raise IntegrityError(
                f"event {logged.seq} was answered otherwise when it happened: the run was made by another dora-rl "
                "or with another configuration"
            )
        yield logged
