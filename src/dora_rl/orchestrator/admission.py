"""Which new groups begin where, and when.

Invariants:
- waiting requests get the room on an instance before new groups do;
- new groups go to the emptiest slot of the rollout version; while further slots are still loading that version, no
  slot takes more than its even share;
- once there are enough untrained groups (`pacing`), only instances with nothing to do get new ones;
- a group that the trainer does not want yet is held back, and a timer is set for when it will be wanted.

`_room` is a heap of (load, number, slot) over the slots of the rollout version. Its entries may be out of date: they
are checked when popped, and a slot whose load falls is pushed again.
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

    def __init__(self, context: Context, scheduler: RequestScheduler) -> None:
        self._context = context
        self._scheduler = scheduler
        self._room: list[tuple[float, int, SlotState]] = []
        self._pushed = 0
        self._fetching = False
        """Prompts are asked for and have not arrived."""
        self._retry_at: Nanoseconds | None = None
        """When the next timer for a held-back group is due."""

    def admit(self) -> None:
        """Admit groups while the rules allow it and a slot of the rollout version has room."""
        context = self._context
        version = context.rollout_version()
        self._fetch()
        if version is None or not context.prompts:
            return
        wanted = context.wanted()
        while wanted > 0 and context.prompts:
            slot = self._emptiest_slot(version, context.prompts[0].tokens, wanted)
            if slot is None:
                break
            self._scheduler.start(version, slot)
            self.offer_room(slot)
            wanted -= 1
        self._set_retry_timer()
        self._fetch()

    def retry_due(self) -> None:
        """The trainer may want further groups now."""
        self._retry_at = None

    def offer_room(self, slot: SlotState) -> None:
        """The slot may have room for new groups."""
        self._pushed += 1
        heapq.heappush(self._room, (slot.instance.load, self._pushed, slot))

    def clear_room(self) -> None:
        """The rollout version has changed: no slot has room for it yet."""
        self._room.clear()

    def prompts_arrived(self) -> None:
        self._fetching = False

    # -- inside -----------------------------------------------------------------------------------------------

    def _set_retry_timer(self) -> None:
        """If pacing holds the next group back, look again when the trainer wants it."""
        context = self._context
        if context.wanted() or not context.allowance():
            return
        context.pacing.record_held_back(context.now)
        due = context.pacing.opens_at(context.groups.live, context.now)
        if due is not None and (self._retry_at is None or due < self._retry_at):
            self._retry_at = due
            context.timers.set(due, Wait.ADMIT)

    def _fetch(self) -> None:
        """Keep at least a step's worth of prompts ready."""
        context = self._context
        batch = context.config.groups_per_step
        if not self._fetching and not context.prompts_ended and len(context.prompts) < batch:
            self._fetching = True
            context.emit(FetchPrompts(count=2 * batch - len(context.prompts)))

    def _emptiest_slot(self, version: Version, prompt_tokens: int, wanted: int) -> SlotState | None:
        """The slot on which the next group begins; None if no slot has room for it."""
        context = self._context
        size = context.config.group_size
        share = 1.0 - context.config.kv_headroom
        loading = context.instances.loading.get(version, 0)
        enough = context.mode.serves_several_versions and context.groups.live >= context.pacing.enough()
        even = math.inf
        if loading:
            requests = self._scheduler.requests.get(version, 0) + wanted * size
            even = max(size, math.ceil(requests / len(context.instances.slots_of(version))))
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
                break  # all others have something to do as well
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
        """The other instances could take over the requests of sharing ones when the trainer's devices train again.

        Sharing instances take no more than that: further requests would wait there and grow stale. The requests left by
        then are those that are longer than the tokens that fit into the trainer's usual wait.
        """
        instances, lengths = self._context.instances, self._scheduler.lengths
        if not instances.dedicated_kv or not lengths.observed:
            return True
        step = instance.spec.decode.seconds(instance.active, instance.kv_tokens)
        fitting = self._context.collect_seconds / step if step else 0.0
        stranded = lengths.survival(fitting) * (instances.sharing_requests + self._context.config.group_size)
        return stranded <= instances.dedicated_kv / (prompt_tokens + lengths.mean_context())

    def _admission_tokens(self, instance: InstanceState, prompt_tokens: int) -> int:
        """KV that a new group will soon need, with the near growth of what runs there already."""
        size = self._context.config.group_size
        return prompt_tokens + (instance.active + size) * self._context.config.kv_reserve_tokens

    def check(self) -> None:
        """Assert that admission stays within the bound and that a held-back group has a timer."""
        context = self._context
        limit = (context.policy.staleness + 1) * context.config.groups_per_step
        if context.steps is not None:
            kept = context.groups.kept
            assert kept <= context.steps * context.config.groups_per_step, f"{kept} groups are too many"
        # Groups admitted under a larger bound may exceed the limit of a smaller one; then nothing is admitted.
        live = context.groups.live
        assert live <= limit or not context.allowance(), f"{live} groups are untrained, and admission is open"
        due = context.timers.next_due()
        assert self._retry_at is None or (due is not None and due <= self._retry_at), "a held-back group has no timer"
