"""Which slot serves which version: loading, emptying and re-partitioning slots.

A slot changes its version only while it is empty (mode `partial` apart). So re-partitioning means: decide how many
slots each version should have (`placement`), empty the surplus ones by moving their requests to the other slots of
their version (`migration`), and give each slot that became empty to the version that needs it most:

1. a version with waiting requests and no slot at all, oldest first;
2. a version with fewer slots than its target, oldest first;
3. the rollout version.

While instances pause (their devices train), plans divide the other slots, for all requests: those on paused instances
go on there.

Invariants:
- a version that has requests keeps at least one slot, or gets the next one that can be had;
- `leaving` slots take nothing new, so they become empty, if not by moves then because requests end;
- where every instance has slots for all versions that have requests, in one batch, nothing is re-partitioned: emptying
  a slot would gain nothing;
- a version is retired when it is not the newest, no slot serves or loads it, and no unfinished group has it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from dora_rl.core.commands import LoadVersion, Retire, UnloadSlot
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import SlotLoaded
from dora_rl.core.types import SECOND, DecodeCost, InstanceSpec, Nanoseconds, SlotId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import Stage, TrajectoryState
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.migration import PlannedMove, evacuate, lighten, movable, spread
from dora_rl.orchestrator.placement import PlacementFacts, Targets, VersionFacts
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.timers import Wait
from dora_rl.orchestrator.trainer_state import TrainerState

MOST_LOAD_FAILURES = 3
_RECEIVERS = 16
"""How many slots may share the requests of an emptied one: enough to balance, few enough to plan fast."""


class SlotAssignment:
    """Assigns versions to slots."""

    def __init__(self, context: Context, rollout: RequestScheduler, training: TrainerState) -> None:
        self._context = context
        self._rollout = rollout
        self._training = training
        self._rule = context.config.placement_rule
        self._targets: Targets = {}
        self._try_below: dict[Version, int] = {}
        """Number of requests of a draining version below which emptying a slot is tried again."""
        self._loading_since: dict[SlotId, Nanoseconds] = {}
        self._load_seconds = 0.0
        self._rollout_version: Version | None = None
        self._donors: dict[Version, deque[SlotState]] = {}
        """Slots of versions that get more of them, the fullest first, as of the last rebalancing."""
        self._stranded: dict[Version, list[TrajectoryState]] = {}
        """Requests on paused instances, by version."""
        self._live: list[Version] = []
        """Published and not retired, oldest first."""
        self._max_requests = 0
        self._kv_tokens = 0
        self._decode = DecodeCost()

    # -- reports ----------------------------------------------------------------------------------------------

    def joined(self, spec: InstanceSpec) -> None:
        """A typical instance is what plans are made for; fleets are uniform or nearly so."""
        self._max_requests, self._kv_tokens, self._decode = spec.max_requests, spec.kv_tokens, spec.decode
        self._try_below.clear()

    def loaded(self, event: SlotLoaded) -> bool:
        """A slot serves its new version; False if the report is late or a duplicate."""
        context = self._context
        slot = context.fleet.slot(event.slot)
        if slot is None or slot.loading != event.version:
            return False
        if event.fingerprint != context.fingerprints.get(event.version):
            raise IntegrityError(
                f"slot {event.slot} serves fingerprint {event.fingerprint} as version {event.version}, "
                f"published was {context.fingerprints.get(event.version)}"
            )
        published = context.probes.get(event.version, "")
        compared = "" if event.probe is None else event.probe.digest
        if compared != published:
            raise IntegrityError(
                f"slot {event.slot} serves version {event.version} without a comparison with the probe that was "
                f"published with it: {published or 'none'} was, {compared or 'none'} was compared with"
            )
        slot.instance.load_failures = 0
        slot.instance.heard = context.now
        since = self._loading_since.pop(slot.id, context.now)
        self._load_seconds = max((context.now - since) / SECOND, self._load_seconds / 2)
        context.fleet.end_load(slot, event.version)
        self._rollout.touch(slot)
        if context.mode.mixes_versions:
            self._update_in_flight(slot)
        elif event.version != self._rollout_version and event.version not in self._rollout.waiting:
            self._spread_to(slot, event.version)
        return True

    def _spread_to(self, slot: SlotState, version: Version) -> None:
        """Bring an old version's requests to a slot that it was just given."""
        donors = self._donors.get(version)
        if donors:
            even = max(1, self._rollout.requests.get(version, 0) // len(self._context.fleet.of(version)))
            self._rollout.move(spread(slot, donors, even, self._context.config.pack_limit))

    def load_failed(self, slot: SlotState, version: Version) -> bool:
        """True if the instance has failed too often."""
        if slot.loading != version:
            return False
        self._context.fleet.end_load(slot, None)
        self._loading_since.pop(slot.id, None)
        slot.instance.load_failures += 1
        self._rollout.touch(slot)
        return slot.instance.load_failures >= MOST_LOAD_FAILURES

    def load_overdue(self, slot_id: SlotId, since: Nanoseconds) -> bool:
        """True if the slot is still in the load that began then."""
        return self._loading_since.get(slot_id) == since

    def forget(self, instance: InstanceState) -> None:
        for slot in instance.slots:
            self._loading_since.pop(slot.id, None)

    def published(self, version: Version) -> None:
        """A new version can be loaded."""
        self._live.append(version)
        if self._context.mode.mixes_versions:
            for slot in self._slots():
                self._update_in_flight(slot)

    # -- upkeep, after each event -----------------------------------------------------------------------------

    def notice_rollout_version(self) -> bool:
        """True if new groups get another version than before."""
        version = self._context.rollout_version()
        if version == self._rollout_version:
            return False
        self._rollout_version = version
        for slot in self._slots():
            self._rollout.touch(slot)
        return True

    def fill(self, slot: SlotState) -> None:
        """Give the slot, if it is empty, the version that needs it most."""
        if slot.loading is not None or slot.instance.paused or not slot.empty:
            return
        if slot.leaving:
            slot.leaving = False
            self._rollout.touch(slot)  # waiting requests of its version may come now
        if slot.version is not None and slot.version in self._rollout.waiting:
            return  # it takes those as soon as its instance has room
        version = self._wanted(slot)
        if version is not None:
            self._load(slot, version)
        elif slot.version not in (None, self._rollout_version):
            # A spare slot holds nothing, so that old weights are freed.
            self._context.fleet.end_load(slot, None)
            self._context.say(UnloadSlot(slot=slot.id))

    def find_slots_for_waiting(self) -> None:
        """A version with waiting requests and no slot takes over one of the rollout version's."""
        for version in self._homeless():
            slots = [slot for slot in self._slots() if not slot.instance.paused and slot.loading is None]
            if any(slot.leaving for slot in slots):
                return
            for slot in slots:
                if slot.empty:
                    self._load(slot, version)
                    break
            else:
                victims = [slot for slot in slots if slot.version == self._rollout_version]
                if victims:
                    self._leave(min(victims, key=lambda slot: len(slot.requests)))

    def consolidate(self, version: Version) -> None:
        """A draining version has fewer requests than before: see whether it can do with fewer slots.

        Tried only after its requests have fallen by a part, so that the cost of an event does not grow with the
        fleet.
        """
        context = self._context
        if not context.mode.serves_several_versions or not self._rule.consolidates or self._all_fit():
            return
        if version == self._rollout_version or not context.admissible():
            return
        requests = self._rollout.requests.get(version, 0)
        if not requests or requests > self._try_below.get(version, requests):
            return
        slots = self._running(version)
        self._try_below[version] = requests - max(1, requests // 64, requests // (4 * max(1, len(slots))))
        if len(slots) > 1:
            tokens = sum(slot.instance.kv_tokens for slot in context.fleet.of(version).values())
            fewest = max(
                1,
                math.ceil(requests / self._max_requests),
                math.ceil(tokens / (self._kv_tokens * context.config.pack_limit)),
                self._targets.get(version, 1),
            )
            self._empty(version, len(slots) - fewest)

    def rebalance(self) -> None:
        """The mandatory and periodic trigger: new targets for all versions."""
        context = self._context
        if not context.mode.serves_several_versions or self._rollout_version is None or not context.fleet.instances:
            return
        if self._all_fit():
            self._targets = {}
            self._donors.clear()
            return
        self._targets = self._rule.targets(self._facts())
        missing = 0
        self._donors.clear()
        for version in sorted(self._targets):
            have = self._have(version)
            if have > self._targets[version]:
                self._empty(version, have - self._targets[version])
            elif have < self._targets[version]:
                missing += self._targets[version] - have
                slots = sorted(context.fleet.of(version).values(), key=lambda slot: -len(slot.requests))
                self._donors[version] = deque(slots)
        if missing:
            idle = [slot for slot in self._slots() if slot.empty and slot.loading is None]
            for slot in idle:
                self.fill(slot)
            self._empty(self._rollout_version, missing - len(idle), leave=True)

    def relieve(self, instance: InstanceState) -> None:
        """The instance's KV cache overflows: move requests to emptier slots of their version."""
        context = self._context
        if not context.mode.serves_several_versions:
            return
        excess = instance.kv_tokens - int(instance.spec.kv_tokens * context.config.pack_limit)
        for slot in instance.slots:
            if slot.serving is None or excess <= 0:
                continue
            others = [other for other in context.fleet.of(slot.serving).values() if other.instance is not instance]
            others = heapq.nsmallest(_RECEIVERS, others, key=lambda other: other.instance.load)
            moves = lighten(slot, others, excess, context.config.pack_limit)
            excess -= sum(trajectory.context for move in moves for trajectory in move.trajectories)
            self._rollout.move(moves)

    def retire(self) -> None:
        """Free the weights of versions that nothing holds."""
        context = self._context
        for version in [version for version in self._live if version != context.newest]:
            held = not context.mode.mixes_versions and version in context.ledger.unfinished
            if not held and version != self._rollout_version and not context.fleet.of(version):
                self._live.remove(version)
                self._targets.pop(version, None)
                self._try_below.pop(version, None)
                context.say(Retire(version=version))

    # -- inside -----------------------------------------------------------------------------------------------

    def _slots(self) -> list[SlotState]:
        return [slot for instance in self._context.fleet.instances.values() for slot in instance.slots]

    def _all_fit(self) -> bool:
        """Every instance decodes all its slots in one batch, and has one for each version that has requests."""
        if not self._context.fleet.one_batch:
            return False
        needed = self._rollout.requests.keys() | {self._rollout_version}
        return all(len(instance.slots) >= len(needed) for instance in self._context.fleet.instances.values())

    def _running(self, version: Version) -> list[SlotState]:
        """The slots that serve or load a version and are not paused."""
        return [slot for slot in self._context.fleet.of(version).values() if not slot.instance.paused]

    def _have(self, version: Version) -> int:
        """How many there are of them; at once where none can be paused, since each slot that is filled asks."""
        fleet = self._context.fleet
        return len(self._running(version)) if fleet.sharing else len(fleet.of(version))

    def _homeless(self) -> list[Version]:
        """Versions with waiting requests and no slot, oldest first."""
        rollout, fleet = self._rollout, self._context.fleet
        return [version for version in sorted(rollout.waiting) if not fleet.of(rollout.serving(version))]

    def _wanted(self, slot: SlotState) -> Version | None:
        for version in self._homeless():
            return self._rollout.serving(version)
        for version, target in sorted(self._targets.items()):
            short = self._rollout.requests.get(version, 0) and self._have(version) < target
            if short and not slot.instance.offers(version):
                return version
        rollout_version = self._rollout_version
        if rollout_version is None or slot.instance.offers(rollout_version):
            return None
        return rollout_version

    def _load(self, slot: SlotState, version: Version, *, in_flight: bool = False) -> None:
        context = self._context
        context.fleet.begin_load(slot, version)
        slot.told = None
        self._loading_since[slot.id] = context.now
        for sibling in slot.instance.slots:
            self._rollout.touch(sibling)  # what the instance offers has changed
        context.say(LoadVersion(slot=slot.id, version=version, in_flight=in_flight))
        context.wait(Wait.LOAD, context.config.deadlines.load, slot.id, context.now)

    def _update_in_flight(self, slot: SlotState) -> None:
        newest = self._context.newest
        assert newest is not None
        if slot.loading is None and slot.version not in (None, newest) and not slot.instance.paused:
            self._load(slot, newest, in_flight=bool(slot.requests))

    def paused(self, instances: Iterable[InstanceState]) -> None:
        """Devices of these instances train now: their requests may go on elsewhere, the longest first."""
        if not self._context.mode.serves_several_versions:
            return
        held: dict[Version, list[TrajectoryState]] = {}
        for instance in instances:
            for slot in instance.slots:
                for trajectory in slot.requests.values():
                    held.setdefault(trajectory.group.version, []).append(trajectory)
        for version, trajectories in held.items():
            trajectories.sort(key=lambda trajectory: trajectory.tokens)  # the longest is taken first, from the end
            self._stranded[version] = trajectories
            for slot in self._context.fleet.of(version).values():
                self._rollout.touch(slot)

    def take_in_stranded(self, slot: SlotState) -> None:
        """Requests on paused instances come before new groups: what room the slot has is theirs."""
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
            self._rollout.move([PlannedMove(source=source, target=slot, trajectories=tuple(trajectories))])

    def resumed(self, instance: InstanceState) -> None:
        """The instance's devices no longer train."""
        self._stranded.clear()
        for slot in instance.slots:
            self._rollout.touch(slot)
            if self._context.mode.mixes_versions:
                self._update_in_flight(slot)

    def _leave(self, slot: SlotState) -> None:
        """Take nothing new on this slot, and move away what can be moved."""
        slot.leaving = True
        if slot.version is None or not movable(slot):
            return
        others = sorted(self._context.fleet.of(slot.version).values(), key=lambda other: other.instance.load)
        moves = evacuate(slot, others[: _RECEIVERS + 1], self._context.config.pack_limit)
        if moves is not None:
            self._rollout.move(moves)

    def _empty(self, version: Version, count: int, *, leave: bool = False) -> None:
        """Empty the `count` slots of a version that are least loaded, if moving pays; with `leave`, in any case."""
        if count <= 0:
            return
        slots = sorted(self._running(version), key=lambda slot: slot.instance.load)
        slots = [slot for slot in slots if slot.loading is None and not slot.leaving]
        count = min(count, len(slots) - 1)
        for number in range(count):
            slot = slots[number]
            if slot.empty or not movable(slot):
                continue
            receivers = slots[count : count + _RECEIVERS]
            moves = evacuate(slot, receivers, self._context.config.pack_limit)
            if moves is None:
                if leave:
                    slot.leaving = True
                continue
            if leave or self._pays(slot):
                slot.leaving = True
                self._rollout.move(moves)
                # Receivers that are nearly full go to the end, so that the next ones are tried.
                slots[count:] = sorted(slots[count:], key=lambda other: other.instance.load)

    def _pays(self, slot: SlotState) -> bool:
        """The slot would drain by itself so late that moving its requests is cheaper."""
        instance = slot.instance
        oldest = max(trajectory.tokens for trajectory in slot.requests.values())
        step = instance.spec.decode.seconds(instance.active, instance.kv_tokens)
        if not step:
            return True
        drain = self._rollout.lengths.remaining(oldest, 0.5) * step
        cost = self._load_seconds + instance.kv_tokens * self._rollout.move_seconds_per_token
        return drain > 2 * cost

    def _seconds_left(self, version: Version) -> float:
        """Until the step of the version's deadline needs its groups, if the trainer never waits."""
        context = self._context
        assert context.newest is not None
        if self._training.busy_seconds is None:
            return math.inf
        deadline = context.ledger.first_due.get(version, version + context.policy.staleness)
        steps = deadline - context.newest + 1
        elapsed = (context.now - self._training.published_at) / SECOND
        return max(0.0, steps * self._training.busy_seconds - elapsed)

    def _longest(self, version: Version, oldest: int) -> int:
        """Tokens still to come for the longest of a version's requests: of many, one is likely to be very long."""
        requests = self._rollout.requests[version]
        return self._rollout.lengths.remaining(oldest, requests / (requests + 1))

    def _facts(self) -> PlacementFacts:
        context = self._context
        rollout_version = self._rollout_version
        assert rollout_version is not None
        tokens: dict[Version, int] = {}
        oldest: dict[Version, int] = {}
        for slot in self._slots():
            for trajectory in slot.requests.values():
                version = trajectory.group.version
                tokens[version] = tokens.get(version, 0) + trajectory.context
                if trajectory.tokens > oldest.get(version, -1):
                    oldest[version] = trajectory.tokens
        admissible = context.admissible() * context.config.group_size
        return PlacementFacts(
            newest=rollout_version,
            old=tuple(
                VersionFacts(
                    version=version,
                    requests=self._rollout.requests[version],
                    kv_tokens=tokens[version],
                    slots=self._have(version),
                    longest=self._longest(version, oldest[version]),
                    seconds_left=self._seconds_left(version),
                )
                for version in sorted(tokens)
                if version != rollout_version
            ),
            newest_requests=self._rollout.requests.get(rollout_version, 0) + admissible,
            admissible=admissible,
            slots=sum(len(it.slots) for it in context.fleet.instances.values() if not it.paused),
            max_requests=self._max_requests,
            kv_tokens=max(1, int(self._kv_tokens * context.config.pack_limit)),
            decode=self._decode,
            overhead_seconds=self._load_seconds,
        )
