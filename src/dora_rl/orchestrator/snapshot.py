"""The orchestrator's public state, for dashboards and tests."""

from __future__ import annotations

from dora_rl.core.activities import IdleCause
from dora_rl.core.types import Record, SlotId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.trainer_state import TrainerState


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
    """The cause that was reported last, while the slot idles."""


class Snapshot(Record, frozen=True, kw_only=True):
    """The state of the orchestrator between two events."""

    newest: Version | None
    rollout_version: Version | None
    max_staleness: int
    """The bound under which groups are admitted now."""
    admissible: int
    """Groups that would be admitted now if there were room."""
    admitted: int
    """Groups that were admitted since the run began; those that have ended are counted by their outcome."""
    trained: int
    failed: int
    without_signal: int
    untrained: dict[Version, int]
    """Untrained groups, by version."""
    waiting: dict[Version, int]
    """Requests without a slot, by version."""
    trainer: str
    """Stage of the trainer."""
    slots: tuple[SlotView, ...]


def take_snapshot(context: Context, scheduler: RequestScheduler, trainer: TrainerState) -> Snapshot:
    """The state of an orchestrator's components. It changes nothing."""
    return Snapshot(
        newest=context.newest,
        rollout_version=context.rollout_version(),
        max_staleness=context.policy.staleness,
        admissible=context.admissible(),
        admitted=context.groups.admitted,
        trained=context.groups.trained,
        failed=context.groups.failed,
        without_signal=context.groups.without_signal,
        untrained=dict(context.groups.untrained),
        waiting={version: len(queue) for version, queue in scheduler.waiting.items()},
        trainer=trainer.stage.name.lower(),
        slots=tuple(
            SlotView(
                slot=slot.id,
                version=slot.version,
                loading=slot.loading,
                requests=len(slot.requests),
                incoming=len(slot.incoming),
                leaving=slot.leaving,
                paused=slot.instance.paused,
                active=slot.instance.active,
                idle=slot.idle_cause,
            )
            for slot in context.instances.slots()
        ),
    )
