"""Which slot serves which version: loading versions into slots, emptying slots, and retiring versions.

A slot changes its version only while it is empty (unless the mode mixes versions). A slot that became empty goes to the
version that needs it most:

1. a version with waiting requests and no slot at all, oldest first;
2. a version with fewer slots than its target (`rebalance` sets the targets) and than requests, oldest first;
3. the rollout version.

A version that gives up a slot lowers its target: its requests on that slot have ended.

Invariants:
- a version that has requests keeps at least one slot, or gets the next one that becomes available;
- no slot goes back and forth between versions while it is empty;
- a `leaving` slot takes no new requests, so it becomes empty, if not by moves then because its requests end;
- a version is retired when it is not the newest, no slot serves or loads it, and no unfinished group has it.
"""

from __future__ import annotations

from dora_rl.core.commands import LoadVersion, Retire, UnloadSlot
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import SlotLoaded
from dora_rl.core.types import SECOND, Nanoseconds, SlotId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.migration import MAX_RECEIVERS, evacuate, movable
from dora_rl.orchestrator.placement import Targets
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.timers import Wait

MAX_LOAD_FAILURES = 3
"""An instance whose loads fail this often in a row is given up."""


class SlotAssignment:
    """Assigns versions to slots."""

    def __init__(self, context: Context, scheduler: RequestScheduler) -> None:
        self._context = context
        self._scheduler = scheduler
        self.targets: Targets = {}
        """How many slots each old version should have."""
        self.rollout_version: Version | None = None
        """The version that new groups get, as of the last `update_rollout_version`."""
        self.load_seconds = 0.0
        """How long a load takes, as measured: the last load, but at least half of the value before."""
        self._loading_since: dict[SlotId, Nanoseconds] = {}
        self._unretired: list[Version] = []
        """Versions that are published and not retired, oldest first."""

    # -- events -----------------------------------------------------------------------------------------------

    def loaded(self, event: SlotLoaded) -> SlotState | None:
        """A slot serves its new version; returns the slot, or None if the report is late or a duplicate."""
        context = self._context
        slot = context.instances.slot(event.slot)
        if slot is None or slot.loading != event.version:
            return None
        self._check_loaded(event)
        slot.instance.load_failures = 0
        slot.instance.progress_at = context.now
        since = self._loading_since.pop(slot.id, context.now)
        self.load_seconds = max((context.now - since) / SECOND, self.load_seconds / 2)
        context.instances.end_load(slot, event.version)
        self._scheduler.touch(slot)
        if context.mode.mixes_versions:
            self._update_in_flight(slot)
        return slot

    def _check_loaded(self, event: SlotLoaded) -> None:
        """The slot must serve the weights that were published, and must have been compared with their probe."""
        published = self._context.fingerprints.get(event.version)
        if event.fingerprint != published:
            raise IntegrityError(
                f"slot {event.slot} serves fingerprint {event.fingerprint} as version {event.version}, "
                f"published was {published}"
            )
        probe = self._context.probes.get(event.version, "")
        compared = "" if event.probe is None else event.probe.digest
        if compared != probe:
            raise IntegrityError(
                f"slot {event.slot} serves version {event.version} without a comparison with the probe that was "
                f"published with it: {probe or 'none'} was published, {compared or 'none'} was compared with"
            )

    def load_failed(self, slot: SlotState, version: Version) -> bool:
        """A load failed; True if the instance has failed too often."""
        if slot.loading != version:
            return False
        self._context.instances.end_load(slot, None)
        self._loading_since.pop(slot.id, None)
        slot.instance.load_failures += 1
        self._scheduler.touch(slot)
        return slot.instance.load_failures >= MAX_LOAD_FAILURES

    def load_overdue(self, slot_id: SlotId, since: Nanoseconds) -> bool:
        """The slot is still in the load that began at this time."""
        return self._loading_since.get(slot_id) == since

    def instance_lost(self, instance: InstanceState) -> None:
        for slot in instance.slots:
            self._loading_since.pop(slot.id, None)

    def instance_resumed(self, instance: InstanceState) -> None:
        """The instance's devices no longer train; if it missed a version, it loads it now."""
        if self._context.mode.mixes_versions:
            for slot in instance.slots:
                self._update_in_flight(slot)

    def published(self, version: Version) -> None:
        """A new version can be loaded."""
        self._unretired.append(version)
        if self._context.mode.mixes_versions:
            for slot in self._context.instances.slots():
                self._update_in_flight(slot)

    # -- upkeep, after each event -----------------------------------------------------------------------------

    def update_rollout_version(self) -> bool:
        """True if new groups get another version than before."""
        version = self._context.rollout_version()
        if version == self.rollout_version:
            return False
        self.rollout_version = version
        for slot in self._context.instances.slots():
            self._scheduler.touch(slot)
        return True

    def fill(self, slot: SlotState) -> None:
        """Give the slot, if it is empty, the version that needs it most."""
        if slot.loading is not None or slot.instance.paused or not slot.empty:
            return
        if slot.leaving:
            slot.leaving = False
            self._scheduler.touch(slot)  # waiting requests of its version may come now
        if slot.version is not None and slot.version in self._scheduler.waiting:
            return  # it takes those as soon as its instance has room
        version = self._neediest_version(slot)
        if version is not None:
            given_up = slot.version
            self._load(slot, version)
            if given_up in self.targets:
                # Until the next rebalance. With the target as before, that version would want the slot back at once.
                left = self._context.instances.count_running_slots_of(given_up)
                self.targets[given_up] = min(self.targets[given_up], left)
        elif slot.version not in (None, self.rollout_version):
            # A spare slot holds nothing, so that old weights are freed.
            self._context.instances.unload(slot)
            self._context.emit(UnloadSlot(slot=slot.id))

    def find_slots_for_waiting(self) -> None:
        """A version with waiting requests and no slot takes over one of the rollout version's slots."""
        for version in self._versions_without_slot():
            slots = [
                slot for slot in self._context.instances.slots() if not slot.instance.paused and slot.loading is None
            ]
            if any(slot.leaving for slot in slots):
                return
            for slot in slots:
                if slot.empty:
                    self._load(slot, version)
                    break
            else:
                candidates = [slot for slot in slots if slot.version == self.rollout_version]
                if candidates:
                    self._vacate(min(candidates, key=lambda slot: len(slot.requests)))

    def retire(self) -> list[Version]:
        """Free the weights of versions that nothing holds; returns those versions."""
        context = self._context
        retired = []
        for version in [version for version in self._unretired if version != context.newest]:
            held = not context.mode.mixes_versions and version in context.groups.unfinished
            if not held and version != self.rollout_version and not context.instances.slots_of(version):
                self._unretired.remove(version)
                self.targets.pop(version, None)
                context.emit(Retire(version=version))
                retired.append(version)
        return retired

    # -- inside -----------------------------------------------------------------------------------------------

    def _versions_without_slot(self) -> list[Version]:
        """Versions with waiting requests and no slot, oldest first."""
        scheduler, instances = self._scheduler, self._context.instances
        return [version for version in sorted(scheduler.waiting) if not instances.slots_of(scheduler.serving(version))]

    def _neediest_version(self, slot: SlotState) -> Version | None:
        for version in self._versions_without_slot():
            return self._scheduler.serving(version)
        for version, target in sorted(self.targets.items()):
            useful = min(target, self._scheduler.requests.get(version, 0))
            lacks_slots = self._context.instances.count_running_slots_of(version) < useful
            if lacks_slots and not slot.instance.has_version(version):
                return version
        rollout_version = self.rollout_version
        if rollout_version is None or slot.instance.has_version(rollout_version):
            return None
        return rollout_version

    def _load(self, slot: SlotState, version: Version, *, in_flight: bool = False) -> None:
        context = self._context
        context.instances.begin_load(slot, version)
        slot.idle_cause = None
        self._loading_since[slot.id] = context.now
        for sibling in slot.instance.slots:
            self._scheduler.touch(sibling)  # the set of versions that the instance has is another now
        context.emit(LoadVersion(slot=slot.id, version=version, in_flight=in_flight))
        context.set_timer(Wait.LOAD, context.config.deadlines.load, slot.id, context.now)

    def _update_in_flight(self, slot: SlotState) -> None:
        """Load the newest version into the slot under its running requests."""
        newest = self._context.newest
        assert newest is not None
        if slot.loading is None and slot.version not in (None, newest) and not slot.instance.paused:
            self._load(slot, newest, in_flight=bool(slot.requests))

    def _vacate(self, slot: SlotState) -> None:
        """Let the slot take no new requests, and move away those that can be moved."""
        slot.leaving = True
        if slot.version is None or not movable(slot):
            return
        others = sorted(self._context.instances.slots_of(slot.version).values(), key=lambda other: other.instance.load)
        moves = evacuate(slot, others[: MAX_RECEIVERS + 1], self._context.config.pack_limit)
        if moves is not None:
            self._scheduler.move(moves)

    def check(self) -> None:
        """Assert that loads and versions are accounted for."""
        context = self._context
        loading = {slot.id for slot in context.instances.slots() if slot.loading is not None}
        assert self._loading_since.keys() == loading, f"loads began on {self._loading_since}, slots {loading} load"
        unretired = set(self._unretired)
        assert len(unretired) == len(self._unretired), f"a version is listed twice in {self._unretired}"
        for slot in context.instances.slots():
            for version in (slot.version, slot.loading):
                assert version is None or version in unretired, f"slot {slot.id} holds version {version}, retired"
        if not context.mode.mixes_versions:
            lacking = context.groups.unfinished.keys() - unretired
            assert not lacking, f"versions {lacking} are retired and have unfinished groups"
        assert context.newest is None or context.newest in unretired, f"the newest version {context.newest} is retired"
        assert self.rollout_version is None or self.rollout_version in unretired, "the rollout version is retired"
