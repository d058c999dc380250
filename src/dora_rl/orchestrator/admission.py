"""Which new groups begin where, and when.

Invariants:
- room on an instance is given to waiting requests before new groups;
- new groups go to the emptiest slot of the rollout version; while further slots are still loading that version, no
  slot takes more than its even share;
- once there are enough untrained groups (`pacing`), only instances with nothing to do get new ones;
- a group that the trainer does not want yet is held back, and a timer is set for when it will be wanted.

`_room` is a heap of (load, slot) over the slots of the rollout version. Its entries may be out of date: they are
checked when popped, and a slot whose load falls is pushed again.
"""

from __future__ import annotations

import heapq
import math

from dora_rl.core.commands import FetchPrompts
from dora_rl.core.types import Nanoseconds, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.timers import Wait


class Admission:
    """Admits groups."""

    def __init__(self, context: Context, rollout: RequestScheduler) -> None:
        self._context = context
        self._rollout = rollout
        self._room: list[tuple[float, int, SlotState]] = []
        self._pushed = 0
        self._fetching = False
        self._due: Nanoseconds | None = None
        """When it is next looked at whether the trainer wants groups."""

    def admit(self) -> None:
        """Admit groups while the rules allow it and a slot of the rollout version has room."""
        context = self._context
        version = context.rollout_version()
        self._fetch()
        if version is None or not context.prompts:
            return
        wanted = context.wanted()
        while wanted > 0 and context.prompts:
            slot = self._roomiest(version, context.prompts[0].tokens, wanted)
            if slot is None:
                break
            self._rollout.start(version, slot)
            self.offer_room(slot)
            wanted -= 1
        self._await_trainer()
        self._fetch()

    def due(self) -> None:
        """The trainer may want further groups now."""
        self._due = None

    def offer_room(self, slot: SlotState) -> None:
        """The slot may have room for new groups."""
        self._pushed += 1
        heapq.heappush(self._room, (slot.instance.load, self._pushed, slot))

    def forget_room(self) -> None:
        """The rollout version has changed: no slot has room for it yet."""
        self._room.clear()

    def prompts_arrived(self) -> None:
        self._fetching = False

    # -- inside -----------------------------------------------------------------------------------------------

    def _await_trainer(self) -> None:
        """Come back when the trainer wants the next group, if that is what holds it back."""
        context = self._context
        if context.wanted() or not context.allowance():
            return
        context.pacing.held(context.now)
        due = context.pacing.opens_at(context.ledger.live)
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            context.timers.set(due, Wait.ADMIT)

    def _fetch(self) -> None:
        """Keep a step's worth of prompts at hand."""
        context = self._context
        want = context.config.groups_per_step
        if not self._fetching and not context.prompts_ended and len(context.prompts) < want:
            self._fetching = True
            context.say(FetchPrompts(count=2 * want - len(context.prompts)))

    def _roomiest(self, version: Version, prompt_tokens: int, wanted: int) -> SlotState | None:
        context = self._context
        size = context.config.group_size
        share = 1.0 - context.config.kv_headroom
        loading = context.fleet.loading.get(version, 0)
        enough = context.mode.serves_several_versions and context.ledger.live >= context.pacing.enough()
        even = math.inf
        if loading:
            requests = self._rollout.requests.get(version, 0) + wanted * size
            even = max(size, math.ceil(requests / len(context.fleet.of(version))))
        full: list[tuple[float, int, SlotState]] = []
        chosen: SlotState | None = None
        while self._room and chosen is None:
            load, number, slot = self._room[0]
            instance = slot.instance
            if instance.lost or slot.version != version or not slot.open:
                heapq.heappop(self._room)
            elif load < instance.load:
                heapq.heapreplace(self._room, (instance.load, number, slot))
            elif (
                instance.active and not instance.has_room(size, self._admission_tokens(instance, prompt_tokens), share)
            ) or (instance.spec.shares_trainer and instance.active and not self._may_strand(instance, prompt_tokens)):
                heapq.heappop(self._room)
            elif enough and instance.active:
                break  # and so have all others something to do
            elif slot.requests and len(slot.requests) + size > even:
                if instance.active:
                    break  # the others are at least as full
                full.append(heapq.heappop(self._room))
            else:
                heapq.heappop(self._room)
                chosen = slot
        for entry in full:
            heapq.heappush(self._room, entry)
        return chosen

    def _may_strand(self, instance: InstanceState, prompt_tokens: int) -> bool:
        """Sharing instances take only as much as the others can take over when the trainer's devices train again.

        More would wait there and grow stale. What is left by then are the requests that are longer than the tokens
        that fit into the trainer's usual wait.
        """
        fleet = self._context.fleet
        if not fleet.dedicated_kv or not self._rollout.lengths.seen:
            return True
        step = instance.spec.decode.seconds(instance.active, instance.kv_tokens)
        fitting = self._context.collect_seconds / step if step else 0.0
        stranded = self._rollout.lengths.survival(fitting) * (fleet.sharing_requests + self._context.config.group_size)
        return stranded <= fleet.dedicated_kv / (prompt_tokens + self._rollout.lengths.mean_context())

    def _admission_tokens(self, instance: InstanceState, prompt_tokens: int) -> int:
        """KV that a new group will soon need, with the near growth of what runs there already."""
        size = self._context.config.group_size
        return prompt_tokens + (instance.active + size) * self._context.config.kv_reserve_tokens
