"""The orchestrator's state as plain data, for dashboards and tests."""

from __future__ import annotations

from dora_rl.core.activities import IdleCause
from dora_rl.core.types import Record, SlotId, Version


class SlotView(Record, frozen=True, kw_only=True):
    """One slot."""

    slot: SlotId
    version: Version | None
    loading: Version | None
    requests: int
    incoming: int
    leaving: bool
    paused: bool
    active: int
    """Requests that decode on the whole instance, or are on their way to it."""
    idle: IdleCause | None
    """The cause that was told last, while it idles."""


class Snapshot(Record, frozen=True, kw_only=True):
    """The whole."""

    newest: Version | None
    rollout_version: Version | None
    max_staleness: int
    """The bound under which groups are admitted now."""
    admissible: int
    """Groups that would be admitted now if there were room."""
    untrained: dict[Version, int]
    waiting: dict[Version, int]
    """Requests without a slot, by version."""
    trainer: str
    slots: tuple[SlotView, ...]
