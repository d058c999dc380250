"""The rollout instances, their slots, and which slot serves which version.

Invariants:
- a slot serves at most one version and loads at most one; `slots_of(version)` are the slots that serve or load it;
- a request is in `requests` of exactly one slot; while it moves, that is the source, and the target has the request in
  `incoming`, so that room is reserved for it;
- `active` of an instance counts the requests that decode there or are on their way to it; parked ones do not count;
- everything iterates in order of insertion, so that runs repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_rl.core.activities import IdleCause
from dora_rl.core.types import InstanceId, InstanceSpec, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.orchestrator.group_table import TrajectoryState


@dataclass(slots=True, eq=False)
class SlotState:
    """One slot: holds one set of weights."""

    id: SlotId
    instance: InstanceState = field(repr=False)
    version: Version | None = None
    """The version that it serves; None while it serves nothing."""
    loading: Version | None = None
    """The version that it loads; None while it loads nothing."""
    requests: dict[TrajectoryId, TrajectoryState] = field(default_factory=dict, repr=False)
    incoming: dict[TrajectoryId, TrajectoryState] = field(default_factory=dict, repr=False)
    """Requests that move here."""
    leaving: bool = False
    """It is being emptied: no request may come."""
    idle_cause: IdleCause | None = None
    """The cause of idleness that was reported last; None while it does not idle."""

    @property
    def serving(self) -> Version | None:
        """The version that it can take requests for now."""
        return self.version if self.loading is None else None

    @property
    def empty(self) -> bool:
        return not self.requests and not self.incoming

    @property
    def open(self) -> bool:
        """Requests of its version may come."""
        return self.loading is None and not self.leaving and not self.instance.paused


@dataclass(slots=True, eq=False)
class InstanceState:
    """One rollout engine."""

    spec: InstanceSpec
    progress_at: Nanoseconds
    """When its requests last made progress, or it had none that could."""
    slots: list[SlotState] = field(default_factory=list, repr=False)
    active: int = 0
    kv_tokens: int = 0
    """Tokens in its KV cache: as reported, with estimates of what came and went since."""
    paused: bool = False
    """Its devices are training."""
    lost: bool = False
    load_failures: int = 0
    """Loads that failed since the last one that succeeded."""

    @property
    def load(self) -> float:
        """How full it is, by the scarcer of request room and KV room; 0 while it has nothing to decode."""
        if not self.active:
            return 0.0
        return max(self.active / self.spec.max_requests, self.kv_tokens / self.spec.kv_tokens)

    def reset_kv_if_empty(self) -> None:
        """Between reports the KV load is an estimate; without requests it is known to be 0."""
        if not self.active and all(slot.empty for slot in self.slots):
            self.kv_tokens = 0

    def has_room(self, requests: int, tokens: int, share: float) -> bool:
        """It has room for this many more requests and tokens, using at most a share of the KV cache."""
        return (
            self.active + requests <= self.spec.max_requests and self.kv_tokens + tokens <= self.spec.kv_tokens * share
        )

    def has_version(self, version: Version) -> bool:
        """One of its slots serves or loads this version."""
        return any(version in (slot.version, slot.loading) for slot in self.slots)

    def check(self) -> None:
        """Assert the invariants of its slots and of the requests on them."""
        active = 0
        for slot in self.slots:
            assert slot.instance is self, f"slot {slot.id} belongs to another instance"
            for trajectory_id, trajectory in slot.requests.items():
                assert trajectory.id == trajectory_id, f"slot {slot.id} has {trajectory} under another id"
                assert trajectory.slot is slot, f"{trajectory} is on slot {slot.id} and does not know it"
                active += not trajectory.parked
            for trajectory_id, trajectory in slot.incoming.items():
                assert trajectory.id == trajectory_id, f"slot {slot.id} expects {trajectory} under another id"
                assert trajectory.target is slot, f"slot {slot.id} expects {trajectory}, which does not move to it"
                active += not trajectory.parked
            if not slot.empty:
                assert slot.version is not None, f"slot {slot.id} has requests and no version"
        assert self.active == active, (
            f"instance {self.spec.instance} counts {self.active} active requests, not {active}"
        )
        assert self.kv_tokens >= 0, f"instance {self.spec.instance} counts {self.kv_tokens} tokens of KV"


class InstanceTable:
    """All instances, with their slots indexed by version."""

    def __init__(self) -> None:
        self.by_id: dict[InstanceId, InstanceState] = {}
        self._by_version: dict[Version, dict[SlotId, SlotState]] = {}
        self.loading: dict[Version, int] = {}
        """Number of slots that load each version."""
        self.sharing = 0
        """Number of instances that share the trainer's devices."""
        self.dedicated_kv = 0
        """KV room, in tokens, of the instances that do not share the trainer's devices."""
        self._separate_batches = 0
        """Number of instances that decode each slot in a batch of its own."""

    @property
    def one_batch(self) -> bool:
        """All instances decode their slots in one batch each."""
        return bool(self.by_id) and not self._separate_batches

    @property
    def sharing_requests(self) -> int:
        """Number of active requests on instances that share the trainer's devices."""
        return sum(instance.active for instance in self.by_id.values() if instance.spec.shares_trainer)

    def slots(self) -> list[SlotState]:
        return [slot for instance in self.by_id.values() for slot in instance.slots]

    def slot(self, slot: SlotId) -> SlotState | None:
        """The slot; None if its instance is not there."""
        instance = self.by_id.get(slot.instance)
        return None if instance is None else instance.slots[slot.number]

    def slots_of(self, version: Version) -> dict[SlotId, SlotState]:
        """The slots that serve or load a version."""
        return self._by_version.get(version, {})

    def running_slots_of(self, version: Version) -> list[SlotState]:
        """The slots that serve or load a version on instances that are not paused."""
        return [slot for slot in self.slots_of(version).values() if not slot.instance.paused]

    def count_running_slots_of(self, version: Version) -> int:
        """Number of those; counted without looking at each where no instance can be paused."""
        return len(self.running_slots_of(version)) if self.sharing else len(self.slots_of(version))

    def add(self, spec: InstanceSpec, now: Nanoseconds) -> InstanceState:
        instance = InstanceState(spec=spec, progress_at=now)
        instance.slots = [
            SlotState(id=SlotId(spec.instance, number), instance=instance) for number in range(spec.slots)
        ]
        self.by_id[spec.instance] = instance
        self.sharing += spec.shares_trainer
        self.dedicated_kv += 0 if spec.shares_trainer else spec.kv_tokens
        self._separate_batches += not spec.one_batch
        return instance

    def remove(self, instance: InstanceState) -> None:
        instance.lost = True
        for slot in instance.slots:
            self._assign(slot, None, None)
        del self.by_id[instance.spec.instance]
        spec = instance.spec
        self.sharing -= spec.shares_trainer
        self.dedicated_kv -= 0 if spec.shares_trainer else spec.kv_tokens
        self._separate_batches -= not spec.one_batch

    def begin_load(self, slot: SlotState, version: Version) -> None:
        self._assign(slot, slot.version if slot.requests else None, version)
        slot.leaving = False

    def end_load(self, slot: SlotState, version: Version | None) -> None:
        """The load is over; the slot serves the version, or nothing if the load failed."""
        self._assign(slot, version, None)

    def unload(self, slot: SlotState) -> None:
        """The slot serves nothing."""
        self._assign(slot, None, None)

    def _assign(self, slot: SlotState, version: Version | None, loading: Version | None) -> None:
        for old in {slot.version, slot.loading} - {None}:
            assert old is not None
            slots = self._by_version[old]
            slots.pop(slot.id, None)
            if not slots:
                del self._by_version[old]
        if slot.loading is not None:
            self.loading[slot.loading] -= 1
            if not self.loading[slot.loading]:
                del self.loading[slot.loading]
        slot.version, slot.loading = version, loading
        for new in {version, loading} - {None}:
            assert new is not None
            self._by_version.setdefault(new, {})[slot.id] = slot
        if loading is not None:
            self.loading[loading] = self.loading.get(loading, 0) + 1

    # -- requests ---------------------------------------------------------------------------------------------

    def place(self, trajectory: TrajectoryState, slot: SlotState) -> None:
        """The trajectory runs on this slot from now on."""
        trajectory.slot = slot
        slot.requests[trajectory.id] = trajectory
        if not trajectory.parked:
            slot.instance.active += 1

    def begin_move(self, trajectory: TrajectoryState, target: SlotState) -> None:
        """Reserve room on the target; the source keeps the request until the move is reported."""
        trajectory.target = target
        target.incoming[trajectory.id] = trajectory
        if not trajectory.parked:
            target.instance.active += 1
        target.instance.kv_tokens += trajectory.context

    def end_move(self, trajectory: TrajectoryState, *, arrived: bool) -> None:
        """Place the request on the target if it arrived; give up the reservation if not."""
        source, target = trajectory.slot, trajectory.target
        assert source is not None
        assert target is not None
        trajectory.target = None
        del target.incoming[trajectory.id]
        left = source if arrived else target
        if arrived:
            del source.requests[trajectory.id]
            target.requests[trajectory.id] = trajectory
            trajectory.slot = target
        if not trajectory.parked:
            left.instance.active -= 1
        left.instance.kv_tokens = max(0, left.instance.kv_tokens - trajectory.context)
        left.instance.reset_kv_if_empty()

    def take_off(self, trajectory: TrajectoryState) -> None:
        """The trajectory is on no slot from now on."""
        if trajectory.target is not None:
            self.end_move(trajectory, arrived=False)
        slot = trajectory.slot
        if slot is None:
            return
        trajectory.slot = None
        del slot.requests[trajectory.id]
        if not trajectory.parked:
            slot.instance.active -= 1
        slot.instance.reset_kv_if_empty()

    def park(self, trajectory: TrajectoryState, *, parked: bool) -> None:
        """Park or unpark a trajectory; a parked one leaves its decode room to others."""
        if trajectory.parked == parked:
            return
        trajectory.parked = parked
        change = -1 if parked else 1
        for slot in (trajectory.slot, trajectory.target):
            if slot is not None:
                slot.instance.active += change

    def check(self) -> None:
        """Assert that the counts and the index by version agree with the instances and slots."""
        by_version: dict[Version, set[SlotId]] = {}
        loading: dict[Version, int] = {}
        sharing = dedicated_kv = separate_batches = 0
        for instance_id, instance in self.by_id.items():
            spec = instance.spec
            assert spec.instance == instance_id, f"instance {spec.instance} is listed as {instance_id}"
            assert not instance.lost, f"instance {instance_id} is lost and still listed"
            assert not instance.paused or spec.shares_trainer, f"instance {instance_id} has nothing to pause for"
            sharing += spec.shares_trainer
            dedicated_kv += 0 if spec.shares_trainer else spec.kv_tokens
            separate_batches += not spec.one_batch
            instance.check()
            for slot in instance.slots:
                if slot.version is not None:
                    by_version.setdefault(slot.version, set()).add(slot.id)
                if slot.loading is not None:
                    by_version.setdefault(slot.loading, set()).add(slot.id)
                    loading[slot.loading] = loading.get(slot.loading, 0) + 1
        indexed = {version: slots.keys() for version, slots in self._by_version.items()}
        assert indexed == by_version, f"index of slots by version: {indexed}, not {by_version}"
        assert self.loading == loading, f"counts of loading slots: {self.loading}, not {loading}"
        counts = (self.sharing, self.dedicated_kv, self._separate_batches)
        expected = (sharing, dedicated_kv, separate_batches)
        assert counts == expected, (
            f"counts of sharing instances, dedicated KV, separate batches: {counts} != {expected}"
        )
