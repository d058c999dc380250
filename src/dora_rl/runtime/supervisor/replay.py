"""Replaying an event log through a fresh orchestrator, which is then exactly where it was. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dora_rl.core.errors import IntegrityError
from dora_rl.ledger.writer import LoggedEvent
from dora_rl.orchestrator.orchestrator import Orchestrator


def replay(orchestrator: Orchestrator, log: Iterable[LoggedEvent]) -> Iterator[LoggedEvent]:
    """Each line of the log, once the orchestrator has given the same commands again; otherwise `IntegrityError`."""
    for logged in log:
        if orchestrator.step(logged.event, logged.at) != logged.commands:
            raise IntegrityError(
                f"replaying event {logged.seq} gave other commands than the log has: the run was made by another "
                "version of dora-rl or with another configuration"
            )
        yield logged
