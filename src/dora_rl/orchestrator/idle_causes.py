"""Names the cause of every idle second, when it begins and whenever the cause changes.

While an instance computes for one of its slots, its others are spare, whatever is told of them here: only the world
knows when that is to the moment.
"""

from __future__ import annotations

from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.commands import SlotIdles, TrainerIdles
from dora_rl.core.types import SlotId
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.instances import SlotState
from dora_rl.orchestrator.trainer_state import TrainerStage, TrainerState


class IdleExplainer:
    """Tells the world why slots and trainer idle."""

    def __init__(self, context: Context, training: TrainerState) -> None:
        self._context = context
        self._training = training
        self._idle: dict[SlotId, SlotState] = {}
        self._closed: IdleCause | None = None
        self._trainer: IdleCause | None = None

    def explain(self, touched: dict[SlotId, SlotState]) -> None:
        """Look at the slots that changed, and at all idle ones if what they wait for changed."""
        closed = self._admission_closed()
        if closed != self._closed:
            self._closed = closed
            touched = {**self._idle, **touched}
        for instance in {slot.instance.spec.instance: slot.instance for slot in touched.values()}.values():
            for slot in instance.slots:  # what one waits for may be what another has
                self._explain_slot(slot)
        if self._training.stage is TrainerStage.COLLECTING:
            cause = self._training.waits_for()
            if cause != self._trainer:
                self._trainer = cause
                self._context.say(TrainerIdles(cause=cause))

    def forget(self, slot: SlotState) -> None:
        self._idle.pop(slot.id, None)

    def _explain_slot(self, slot: SlotState) -> None:
        idle = slot.loading is None and not slot.instance.paused and not slot.instance.lost
        if not idle or any(not trajectory.parked for trajectory in slot.requests.values()):
            self._idle.pop(slot.id, None)
            slot.told = None
            return
        self._idle[slot.id] = slot
        cause = self._cause(slot)
        if cause != slot.told:
            slot.told = cause
            self._context.say(SlotIdles(slot=slot.id, cause=cause))

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
        if context.drained and not context.ledger.live:
            return IdleCause(reason=IdleReason.FINISHED)
        if context.allowance():
            if not context.prompts:
                return IdleCause(reason=IdleReason.NO_PROMPTS)
            return None if context.wanted() else IdleCause(reason=IdleReason.AHEAD)
        if self._training.stage in (TrainerStage.TRAINING, TrainerStage.ABSENT):
            return IdleCause(reason=IdleReason.TRAINER, version=context.newest)
        if self._training.stage is TrainerStage.PUBLISHING:
            return IdleCause(reason=IdleReason.PUBLISH, version=context.newest + 1)
        return IdleCause(reason=IdleReason.STRAGGLERS, version=min(context.ledger.unfinished, default=context.newest))
