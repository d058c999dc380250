"""Reports the cause of every idle second, when it begins and whenever the cause changes.

While an instance computes for one of its slots, its other slots are spare, whatever cause is reported for them here:
only the runtime knows to the moment when an instance computes.
"""

from __future__ import annotations

from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.commands import SlotIdles, TrainerIdles
from dora_rl.core.types import SlotId
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.instances import SlotState
from dora_rl.orchestrator.trainer_state import TrainerStage, TrainerState


class IdleExplainer:
    """Reports why slots and trainer idle."""

    def __init__(self, context: Context, trainer: TrainerState) -> None:
        self._context = context
        self._trainer = trainer
        self._idle: dict[SlotId, SlotState] = {}
        self._closed: IdleCause | None = None
        """Why admission is closed, as of the last event."""
        self._trainer_cause: IdleCause | None = None

    def explain(self, touched: dict[SlotId, SlotState]) -> None:
        """Look at the slots that changed, and at all idle ones if the reason why admission is closed changed."""
        closed = self._admission_closed()
        if closed != self._closed:
            self._closed = closed
            touched = {**self._idle, **touched}
        for instance in {slot.instance.spec.instance: slot.instance for slot in touched.values()}.values():
            for slot in instance.slots:  # the cause of one slot may depend on the requests of another
                self._explain_slot(slot)
        if self._trainer.stage is TrainerStage.COLLECTING:
            cause = self._trainer.waits_for()
            if cause != self._trainer_cause:
                self._trainer_cause = cause
                self._context.emit(TrainerIdles(cause=cause))

    def forget(self, slot: SlotState) -> None:
        self._idle.pop(slot.id, None)

    def _explain_slot(self, slot: SlotState) -> None:
        if not self._idles(slot):
            self._idle.pop(slot.id, None)
            slot.idle_cause = None
            return
        self._idle[slot.id] = slot
        cause = self._cause(slot)
        if cause != slot.idle_cause:
            slot.idle_cause = cause
            self._context.emit(SlotIdles(slot=slot.id, cause=cause))

    @staticmethod
    def _idles(slot: SlotState) -> bool:
        """The slot could serve and no request decodes on it."""
        if slot.loading is not None or slot.instance.paused or slot.instance.lost:
            return False
        return all(trajectory.parked for trajectory in slot.requests.values())

    def _cause(self, slot: SlotState) -> IdleCause:
        if not slot.requests and (slot.leaving or slot.incoming):
            return IdleCause(reason=IdleReason.RESERVED, version=slot.version)
        if slot.instance.active:
            return IdleCause(reason=IdleReason.SPARE)
        if any(other.requests for other in slot.instance.slots):
            return IdleCause(reason=IdleReason.TOOL)
        return self._closed or IdleCause(reason=IdleReason.STARTING)

    def _admission_closed(self) -> IdleCause | None:
        """Why no group is admitted now; None while admission is open."""
        context = self._context
        if context.newest is None:
            return IdleCause(reason=IdleReason.STARTING)
        if context.drained and not context.groups.live:
            return IdleCause(reason=IdleReason.FINISHED)
        if context.allowance():
            if not context.prompts:
                return IdleCause(reason=IdleReason.NO_PROMPTS)
            return None if context.wanted() else IdleCause(reason=IdleReason.AHEAD)
        if self._trainer.stage in (TrainerStage.TRAINING, TrainerStage.ABSENT):
            return IdleCause(reason=IdleReason.TRAINER, version=context.newest)
        if self._trainer.stage is TrainerStage.PUBLISHING:
            return IdleCause(reason=IdleReason.PUBLISH, version=context.newest + 1)
        return IdleCause(reason=IdleReason.STRAGGLERS, version=min(context.groups.unfinished, default=context.newest))

    def check(self) -> None:
        """Assert that exactly the slots that idle are listed as idle, and that each of them has a cause."""
        idle = set()
        for slot in self._context.instances.slots():
            if self._idles(slot):
                idle.add(slot.id)
            assert (slot.idle_cause is None) == (slot.id not in idle), f"slot {slot.id} idles for {slot.idle_cause}"
        assert self._idle.keys() == idle, f"slots listed as idle: {self._idle.keys()}, not {idle}"
