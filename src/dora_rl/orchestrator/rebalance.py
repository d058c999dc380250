"""How slots are divided between versions: setting targets, emptying surplus slots, and moving requests.

Rebalancing decides how many slots each version should have (`placement`), empties the surplus ones by moving their
requests to the other slots of their version (`migration`), and leaves it to `slot_assignment` to give each slot that
became empty another version. It happens when a version is published, when an instance joins, is lost, pauses or
resumes, and periodically. In between, a draining version gives up slots as its requests end, if the placement rule
says so, and requests leave an instance whose KV cache overflows.

While instances pause (their devices train), plans divide the slots of the other instances, for all requests: those on
paused instances continue there.

Where every instance has slots for all versions that have requests, and decodes them in one batch, nothing is
rebalanced: emptying a slot would gain nothing. Only modes that serve several versions side by side rebalance at all.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from dora_rl.core.types import SECOND, DecodeCost, InstanceSpec, SlotId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import Stage, TrajectoryState
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.migration import MAX_RECEIVERS, PlannedMove, evacuate, lighten, movable, spread
from dora_rl.orchestrator.placement import PlacementFacts, VersionFacts
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.slot_assignment import SlotAssignment
from dora_rl.orchestrator.trainer_state import TrainerState


class Rebalancer:
    """Divides slots between versions and moves requests accordingly."""

    def __init__(
        self, context: Context, scheduler: RequestScheduler, assignment: SlotAssignment, trainer: TrainerState
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._assignment = assignment
        self._trainer = trainer
        self._rule = context.config.placement_rule
        self._enabled = context.mode.serves_several_versions
        self._consolidate_at: dict[Version, int] = {}
        """Number of requests of a draining version at or below which emptying a slot is tried again."""
        self._donors: dict[Version, deque[SlotState]] = {}
        """Slots of versions that get more of them, the fullest first, as of the last rebalance."""
        self._stranded: dict[Version, list[TrajectoryState]] = {}
        """Requests on paused instances, by version, the longest last."""
        self._max_requests = 0
        self._kv_tokens = 0
        self._decode = DecodeCost()

    # -- events -----------------------------------------------------------------------------------------------

    def instance_joined(self, spec: InstanceSpec) -> None:
        """Plan for instances like this one: the instances of a run are alike, or nearly so."""
        self._max_requests, self._kv_tokens, self._decode = spec.max_requests, spec.kv_tokens, spec.decode
        self._consolidate_at.clear()

    def instances_paused(self, instances: Iterable[InstanceState]) -> None:
        """The devices of these instances train now: their requests may continue elsewhere, the longest first."""
        if not self._enabled:
            return
        held: dict[Version, list[TrajectoryState]] = {}
        for instance in instances:
            for slot in instance.slots:
                for trajectory in slot.requests.values():
                    held.setdefault(trajectory.group.version, []).append(trajectory)
        for version, trajectories in held.items():
            trajectories.sort(key=lambda trajectory: trajectory.tokens)  # the longest is taken first, from the end
            self._stranded[version] = trajectories
            for slot in self._context.instances.slots_of(version).values():
                self._scheduler.touch(slot)

    def instances_resumed(self) -> None:
        """The trainer's devices are free again: requests on them continue where they are."""
        self._stranded.clear()

    def slot_loaded(self, slot: SlotState) -> None:
        """Bring an old version's requests to a slot that it was just given."""
        version = slot.version
        if version is None or version == self._assignment.rollout_version or version in self._scheduler.waiting:
            return
        donors = self._donors.get(version)
        if donors:
            slots = len(self._context.instances.slots_of(version))
            even = max(1, self._scheduler.requests.get(version, 0) // slots)
            self._scheduler.move(spread(slot, donors, even, self._context.config.pack_limit))

    def version_retired(self, version: Version) -> None:
        self._consolidate_at.pop(version, None)

    def relieve(self, instance: InstanceState) -> None:
        """The instance's KV cache overflows: move requests to emptier slots of their version."""
        if not self._enabled:
            return
        context = self._context
        excess = instance.kv_tokens - int(instance.spec.kv_tokens * context.config.pack_limit)
        for slot in instance.slots:
            if slot.serving is None or excess <= 0:
                continue
            slots = context.instances.slots_of(slot.serving).values()
            others = [other for other in slots if other.instance is not instance]
            others = heapq.nsmallest(MAX_RECEIVERS, others, key=lambda other: other.instance.load)
            moves = lighten(slot, others, excess, context.config.pack_limit)
            excess -= sum(trajectory.context for move in moves for trajectory in move.trajectories)
            self._scheduler.move(moves)

    # -- upkeep, after each event -----------------------------------------------------------------------------

    def take_in_stranded(self, slot: SlotState) -> None:
        """Requests on paused instances come before new groups: they get what room the slot has."""
        stranded = self._stranded.get(slot.version) if slot.version is not None else None
        if not stranded or not slot.open:
            return
        moves: dict[SlotId, list[TrajectoryState]] = {}
        requests = tokens = 0
        share = self._context.config.pack_limit
        while stranded:
            trajectory = stranded[-1]
            source = trajectory.slot
            if source is not None and source.instance.paused and trajectory.stage is Stage.RUNNING:
                fits = slot.instance.has_room(requests + 1, tokens + trajectory.context, share)
                if not fits and (requests or slot.instance.active):
                    break  # an instance with nothing on it takes any request
                requests += 1
                tokens += trajectory.context
                moves.setdefault(source.id, []).append(trajectory)
            stranded.pop()
        for trajectories in moves.values():
            source = trajectories[0].slot
            assert source is not None
            self._scheduler.move([PlannedMove(source=source, target=slot, trajectories=tuple(trajectories))])

    def consolidate(self, version: Version) -> None:
        """A draining version has fewer requests than before: see whether fewer slots are enough for it.

        Tried only after its requests have fallen by a part, so that the cost of an event does not grow with the number
        of instances.
        """
        if not self._enabled or not self._rule.consolidates or self._all_fit():
            return
        context = self._context
        if version == self._assignment.rollout_version or not context.admissible():
            return
        requests = self._scheduler.requests.get(version, 0)
        if not requests or requests > self._consolidate_at.get(version, requests):
            return
        slots = context.instances.running_slots_of(version)
        self._consolidate_at[version] = requests - max(1, requests // 64, requests // (4 * max(1, len(slots))))
        if len(slots) > 1:
            tokens = sum(slot.instance.kv_tokens for slot in context.instances.slots_of(version).values())
            fewest = max(
                1,
                math.ceil(requests / self._max_requests),
                math.ceil(tokens / (self._kv_tokens * context.config.pack_limit)),
                self._assignment.targets.get(version, 1),
            )
            self._empty_slots(version, len(slots) - fewest)

    def rebalance(self) -> None:
        """Set new targets for all versions, and empty surplus slots."""
        context, assignment = self._context, self._assignment
        if not self._enabled or assignment.rollout_version is None or not context.instances.by_id:
            return
        self._donors.clear()
        if self._all_fit():
            assignment.targets = {}
            return
        assignment.targets = self._rule.targets(self._facts(assignment.rollout_version))
        missing = 0
        for version, target in sorted(assignment.targets.items()):
            have = context.instances.count_running_slots_of(version)
            if have > target:
                self._empty_slots(version, have - target)
            elif have < target:
                missing += target - have
                slots = context.instances.slots_of(version).values()
                self._donors[version] = deque(sorted(slots, key=lambda slot: -len(slot.requests)))
        if missing:
            idle = [slot for slot in context.instances.slots() if slot.empty and slot.loading is None]
            for slot in idle:
                assignment.fill(slot)
            self._empty_slots(assignment.rollout_version, missing - len(idle), always=True)

    # -- inside -----------------------------------------------------------------------------------------------

    def _all_fit(self) -> bool:
        """Every instance decodes all its slots in one batch, and has one for each version that has requests."""
        instances = self._context.instances
        if not instances.one_batch:
            return False
        needed = self._scheduler.requests.keys() | {self._assignment.rollout_version}
        return all(len(instance.slots) >= len(needed) for instance in instances.by_id.values())

    def _empty_slots(self, version: Version, count: int, *, always: bool = False) -> None:
        """Empty the `count` least loaded slots of a version, if moving their requests pays; with `always`, in any case.

        At least one slot stays.
        """
        if count <= 0:
            return
        slots = sorted(self._context.instances.running_slots_of(version), key=lambda slot: slot.instance.load)
        slots = [slot for slot in slots if slot.loading is None and not slot.leaving]
        count = min(count, len(slots) - 1)
        for number in range(count):
            slot = slots[number]
            if slot.empty or not movable(slot):
                continue
            receivers = slots[count : count + MAX_RECEIVERS]
            moves = evacuate(slot, receivers, self._context.config.pack_limit)
            if moves is None:
                if always:
                    slot.leaving = True
                continue
            if always or self._pays(slot):
                slot.leaving = True
                self._scheduler.move(moves)
                # Receivers that are nearly full go to the end, so that the next ones are tried.
                slots[count:] = sorted(slots[count:], key=lambda other: other.instance.load)

    def _pays(self, slot: SlotState) -> bool:
        """The slot would drain by itself so late that moving its requests is cheaper."""
        instance = slot.instance
        longest = max(trajectory.tokens for trajectory in slot.requests.values())
        step = instance.spec.decode.seconds(instance.active, instance.kv_tokens)
        if not step:
            return True
        drain = self._scheduler.lengths.remaining(longest, 0.5) * step
        cost = self._assignment.load_seconds + instance.kv_tokens * self._scheduler.move_seconds_per_token
        return drain > 2 * cost

    def _seconds_left(self, version: Version) -> float:
        """Until the step of the version's deadline needs its groups, if the trainer never waits."""
        context = self._context
        assert context.newest is not None
        step_seconds = context.pacing.step_seconds
        if step_seconds is None:
            return math.inf
        deadline = context.groups.first_due.get(version, version + context.policy.staleness)
        steps = deadline - context.newest + 1
        elapsed = (context.now - self._trainer.published_at) / SECOND
        return max(0.0, steps * step_seconds - elapsed)

    def _longest_remaining(self, version: Version, tokens: int) -> int:
        """Tokens still to come for the longest request of a version: among many, one is likely to be very long."""
        requests = self._scheduler.requests[version]
        return self._scheduler.lengths.remaining(tokens, requests / (requests + 1))

    def _facts(self, rollout_version: Version) -> PlacementFacts:
        context = self._context
        tokens: dict[Version, int] = {}
        longest: dict[Version, int] = {}
        for slot in context.instances.slots():
            for trajectory in slot.requests.values():
                version = trajectory.group.version
                tokens[version] = tokens.get(version, 0) + trajectory.context
                if trajectory.tokens > longest.get(version, -1):
                    longest[version] = trajectory.tokens
        admissible = context.admissible() * context.config.group_size
        return PlacementFacts(
            newest=rollout_version,
            old=tuple(
                VersionFacts(
                    version=version,
                    requests=self._scheduler.requests[version],
                    kv_tokens=tokens[version],
                    slots=context.instances.count_running_slots_of(version),
                    longest=self._longest_remaining(version, longest[version]),
                    seconds_left=self._seconds_left(version),
                )
                for version in sorted(tokens)
                if version != rollout_version
            ),
            newest_requests=self._scheduler.requests.get(rollout_version, 0) + admissible,
            admissible=admissible,
            slots=sum(len(instance.slots) for instance in context.instances.by_id.values() if not instance.paused),
            max_requests=self._max_requests,
            kv_tokens=max(1, int(self._kv_tokens * context.config.pack_limit)),
            decode=self._decode,
            overhead_seconds=self._assignment.load_seconds,
        )
