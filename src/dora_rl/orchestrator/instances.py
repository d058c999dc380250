"""The rollout instances, their slots, and which slot serves which version: the partition.

Invariants:
- a slot serves at most one version and loads at most one; a version's `slots` are those that serve or load it;
- a request is in `requests` of exactly one slot; while it moves, that is the source, and the target has it in
  `incoming`, so that its room is reserved;
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
    """One place for one set of weights."""

    id: SlotId
    instance: InstanceState = field(repr=False)
    version: Version | None = None
    """What it serves; None while it serves nothing."""
    loading: Version | None = None
    requests: dict[TrajectoryId, TrajectoryState] = field(default_factory=dict, repr=False)
    incoming: dict[TrajectoryId, TrajectoryState] = field(default_factory=dict, repr=False)
    leaving: bool = False
    """It is being emptied: nothing may come."""
    told: IdleCause | None = None
    """The cause of idleness that the world was told last."""

    @property
    def serving(self) -> Version | None:
        """The version it can take requests for now."""
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
    heard: Nanoseconds
    """When its requests last moved on, or it had none that could."""
    slots: list[SlotState] = field(default_factory=list, repr=False)
    active: int = 0
    kv_tokens: int = 0
    paused: bool = False
    """Its devices are training."""
    lost: bool = False
    load_failures: int = 0

    @property
    def load(self) -> float:
        """How full it is, by the scarcer of its two rooms; with nothing to decode it is as good as empty."""
        if not self.active:
            return 0.0
        return max(self.active / self.spec.max_requests, self.kv_tokens / self.spec.kv_tokens)

    def note_if_empty(self) -> None:
        """Between reports the KV load is an estimate; without requests it is known."""
        if not self.active and all(slot.empty for slot in self.slots):
            self.kv_tokens = 0

    def has_room(self, requests: int, tokens: int, share: float) -> bool:
        """Room for so many more requests that bring so many tokens, using at most a share of the KV cache."""
        return (
            self.active + requests <= self.spec.max_requests and self.kv_tokens + tokens <= self.spec.kv_tokens * share
        )

    def offers(self, version: Version) -> bool:
        """A slot serves or loads this version."""
        return any(version in (slot.version, slot.loading) for slot in self.slots)


class InstanceTable:
    """All instances, with their slots indexed by version."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, InstanceState] = {}
        self._by_version: dict[Version, dict[SlotId, SlotState]] = {}
        self.loading: dict[Version, int] = {}
        """How many slots are loading each version."""
        self.sharing = 0
        """How many instances share the trainer's devices."""
        self.dedicated_kv = 0
        """KV room, in tokens, of the instances that do not."""
        self._batches = 0
        """How many instances decode each slot in a batch of its own."""

    def join(self, spec: InstanceSpec, now: Nanoseconds) -> InstanceState:
        instance = InstanceState(spec=spec, heard=now)
        instance.slots = [
            SlotState(id=SlotId(spec.instance, number), instance=instance) for number in range(spec.slots)
        ]
        self.instances[spec.instance] = instance
        self.sharing += spec.shares_trainer
        self.dedicated_kv += 0 if spec.shares_trainer else spec.kv_tokens
        self._batches += not spec.one_batch
        return instance

    @property
    def one_batch(self) -> bool:
        """All instances decode their slots in one batch each."""
        return bool(self.instances) and not self._batches

    @property
    def sharing_requests(self) -> int:
        """Requests on instances that share the trainer's devices."""
        return sum(it.active for it in self.instances.values() if it.spec.shares_trainer)

    def leave(self, instance: InstanceState) -> None:
        instance.lost = True
        for slot in instance.slots:
            self._assign(slot, None, None)
        del self.instances[instance.spec.instance]
        spec = instance.spec
        self.sharing -= spec.shares_trainer
        self.dedicated_kv -= 0 if spec.shares_trainer else spec.kv_tokens
        self._batches -= not spec.one_batch

    def slot(self, slot: SlotId) -> SlotState | None:
        instance = self.instances.get(slot.instance)
        return None if instance is None else instance.slots[slot.number]

    def of(self, version: Version) -> dict[SlotId, SlotState]:
        """The slots that serve or load a version."""
        return self._by_version.get(version, {})

    def begin_load(self, slot: SlotState, version: Version) -> None:
        self._assign(slot, slot.version if slot.requests else None, version)
        slot.leaving = False

    def end_load(self, slot: SlotState, version: Version | None) -> None:
        """The load is over; None if it failed."""
        self._assign(slot, version, None)

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
        """Give up the reservation, or turn it into a place."""
        source, target = trajectory.slot, trajectory.target
        assert source is not None
        assert target is not None
        trajectory.target = None
        del target.incoming[trajectory.id]
        leaver = source if arrived else target
        if arrived:
            del source.requests[trajectory.id]
            target.requests[trajectory.id] = trajectory
            trajectory.slot = target
        if not trajectory.parked:
            leaver.instance.active -= 1
        leaver.instance.kv_tokens = max(0, leaver.instance.kv_tokens - trajectory.context)
        leaver.instance.note_if_empty()

    def remove(self, trajectory: TrajectoryState) -> None:
        """The trajectory is on no slot any more."""
        if trajectory.target is not None:
            self.end_move(trajectory, arrived=False)
        slot = trajectory.slot
        if slot is None:
            return
        trajectory.slot = None
        del slot.requests[trajectory.id]
        if not trajectory.parked:
            slot.instance.active -= 1
        slot.instance.note_if_empty()

    def park(self, trajectory: TrajectoryState, *, parked: bool) -> None:
        """A parked trajectory leaves its decode room to others."""
        if trajectory.parked == parked:
            return
        trajectory.parked = parked
        change = -1 if parked else 1
        for slot in (trajectory.slot, trajectory.target):
            if slot is not None:
                slot.instance.active += change
