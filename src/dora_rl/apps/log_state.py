"""What a run was doing after each event of its log: requests on slots, versions in slots, groups and the trainer.

The state follows from the events and commands alone. It is what the orchestrator had at that time, as far as a display
needs it, for a fraction of the cost of a replay and without its configuration.

Invariants (tested against the orchestrator, under faults):
- a request is on one slot, or waits for one; it leaves when it is generated or fails;
- `running` and `waiting` count the requests by the version of their group, and have no zeros;
- `untrained` has the groups that are admitted, and are neither published with a step, nor failed, nor without signal.

A `LogObserver` is told of each change. When it is told of the end of something, the state still has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import IdleCause
from dora_rl.core.types import (
    Attempt,
    GroupId,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    SlotId,
    StepId,
    TrajectoryId,
    Version,
)


@dataclass(slots=True)
class Request:
    """A trajectory that is being generated."""

    trajectory: TrajectoryId
    group: GroupId
    group_version: Version
    version: Version
    """The version that generates it; not that of its group in mode `partial` only."""
    slot: SlotId | None
    """The slot it runs on; None while it waits for one. While it moves, the source."""
    target: SlotId | None = None
    """The slot it moves to."""
    attempt: Attempt = 0
    """The last attempt that was started."""
    parked: bool = False
    tokens: int = 0
    """Response tokens, as of the last report."""


@dataclass(slots=True)
class Slot:
    """A slot of an instance."""

    version: Version | None = None
    loading: Version | None = None
    requests: dict[TrajectoryId, Request] = field(default_factory=dict)
    incoming: dict[TrajectoryId, Request] = field(default_factory=dict)


class LogObserver:
    """Is told what changes, with the time of the event; does nothing by default."""

    def request_began(self, request: Request, at: Nanoseconds) -> None:
        """A request runs on its slot from now on: a new one, one that was resumed, or one that has moved."""

    def request_ended(self, request: Request, at: Nanoseconds, outcome: str) -> None:
        """A request leaves its slot."""

    def request_waits(self, request: Request, at: Nanoseconds) -> None:
        """A request begins or ends to move or to wait for its environment, on its slot."""

    def slot_changed(self, slot: SlotId, state: Slot, at: Nanoseconds) -> None:
        """A slot loads a version, serves another one, or none."""

    def slot_gone(self, slot: SlotId, at: Nanoseconds) -> None:
        """The instance of the slot is lost."""

    def published(self, version: Version, at: Nanoseconds) -> None:
        """A version can be loaded."""

    def retired(self, version: Version, at: Nanoseconds) -> None:
        """The weights of a version are freed."""

    def step_applied(self, step: StepId, staleness: Sequence[int], at: Nanoseconds) -> None:
        """A step is complete; `staleness` is that of each of its groups."""

    def counts_changed(self, state: LogState, at: Nanoseconds) -> None:
        """Requests or untrained groups have changed; told once for each event."""

    def tokens_generated(self, count: int, at: Nanoseconds) -> None:
        """Response tokens were reported."""

    def kv_tokens(self, instance: InstanceId, count: int, at: Nanoseconds) -> None:
        """An instance has reported the KV tokens in use."""

    def bound_changed(self, bound: int, at: Nanoseconds) -> None:
        """Groups are admitted under another staleness bound."""

    def fault(self, kind: str, what: str, reason: str, at: Nanoseconds) -> None:
        """Something went wrong: `instance lost`, `i0.1`, and why."""


class LogState:
    """The state of a run after the events seen so far."""

    def __init__(self, group_size: int, observer: LogObserver | None = None) -> None:
        self._group_size = group_size
        self._observer = observer or LogObserver()
        self.at: Nanoseconds = 0
        """Time of the last event."""
        self.newest: Version | None = None
        self.bound: int | None = None
        """The staleness bound, once it was changed."""
        self.requests: dict[TrajectoryId, Request] = {}
        self.slots: dict[SlotId, Slot] = {}
        self.running: Counter[Version] = Counter()
        self.waiting: Counter[Version] = Counter()
        self.untrained: dict[GroupId, Version] = {}
        self.trainer = "starting"
        """What the trainer does, or what it waits for."""
        self._lost: set[InstanceId] = set()
        self._batches: dict[StepId, tuple[GroupId, ...]] = {}
        self._publishing: tuple[Version, Attempt] | None = None
        self._changed = False

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:
        """Fold an event and the commands that answered it."""
        self.at = at
        self._event(event)
        for command in commands:
            self._command(command)
        if self._changed:
            self._changed = False
            self._observer.counts_changed(self, at)

    # -- events -----------------------------------------------------------------------------------------------

    def _event(self, event: e.Event) -> None:
        match event:
            case e.Progress():
                self._progress(event)
            case e.Generated(trajectory=trajectory, attempt=attempt, tokens=tokens):
                self._observer.kv_tokens(event.instance, event.kv_tokens, self.at)
                request = self.requests.get(trajectory)
                if request is not None and request.attempt == attempt:
                    self._count_tokens(request, tokens)
            case e.KvPressure(instance=instance, kv_tokens=count):
                self._observer.kv_tokens(instance, count, self.at)
            case e.Parked() | e.Unparked():
                request = self._on_slot(event.trajectory, event.attempt)
                if request is not None:
                    request.parked = isinstance(event, e.Parked)
                    self._observer.request_waits(request, self.at)
            case e.Moved():
                for request in self._arriving(event):
                    self._arrived(request)
            case e.MoveFailed(kept=kept):
                self._observer.fault("move failed", f"{event.source} to {event.target}", "", self.at)
                for request in self._arriving(event):
                    if kept:
                        self._end_move(request)
                        self._observer.request_waits(request, self.at)
                    else:
                        self._requeue(request, "move failed")
            case _:
                self._other_event(event)

    def _other_event(self, event: e.Event) -> None:
        match event:
            case e.InstanceJoined(spec=spec):
                self._joined(spec)
            case e.InstanceLost(instance=instance, reason=reason):
                self._observer.fault("instance lost", instance, reason, self.at)
                self._instance_lost(instance)
            case e.SlotLoaded(slot=slot, version=version):
                self._load_ended(slot, version, loaded=True)
            case e.SlotLoadFailed(slot=slot, version=version, reason=reason):
                self._observer.fault("load failed", f"v{version} into {slot}", reason, self.at)
                self._load_ended(slot, version, loaded=False)
            case e.Published(version=version, attempt=attempt):
                self._published(version, attempt)
            case e.TrainerLost(reason=reason):
                self._observer.fault("trainer lost", "trainer", reason, self.at)
                self._publishing = None
                self.trainer = "starting"
            case e.BoundChanged(max_staleness=bound):
                self.bound = bound
                self._observer.bound_changed(bound, self.at)
            case _:
                pass

    def _progress(self, event: e.Progress) -> None:
        for trajectory, tokens in event.tokens.items():
            request = self.requests.get(trajectory)
            if request is not None:
                self._count_tokens(request, tokens)
        self._observer.kv_tokens(event.instance, event.kv_tokens, self.at)

    def _count_tokens(self, request: Request, tokens: int) -> None:
        if tokens > request.tokens:
            self._observer.tokens_generated(tokens - request.tokens, self.at)
            request.tokens = tokens

    def _joined(self, spec: InstanceSpec) -> None:
        if spec.instance not in self._lost:
            for number in range(spec.slots):
                self.slots.setdefault(SlotId(spec.instance, number), Slot())

    def _instance_lost(self, instance: InstanceId) -> None:
        self._lost.add(instance)
        number = 0
        while (slot := self.slots.get(SlotId(instance, number))) is not None:
            for request in [*slot.requests.values(), *slot.incoming.values()]:
                self._requeue(request, f"{instance} lost")
            self._observer.slot_gone(SlotId(instance, number), self.at)
            del self.slots[SlotId(instance, number)]
            number += 1

    def _load_ended(self, slot_id: SlotId, version: Version, *, loaded: bool) -> None:
        slot = self.slots.get(slot_id)
        if slot is None or slot.loading != version:
            return
        slot.loading, slot.version = None, version if loaded else None
        self._observer.slot_changed(slot_id, slot, self.at)
        for request in [one for one in slot.requests.values() if loaded and one.version != version]:
            self._observer.request_ended(request, self.at, "continues under new weights")
            request.version = version
            self._observer.request_began(request, self.at)

    def _published(self, version: Version, attempt: Attempt) -> None:
        if self._publishing != (version, attempt) or (self.newest is not None and version <= self.newest):
            return
        self.newest = version
        for group in self._batches.pop(version - 1, ()):
            self.untrained.pop(group, None)
        self._changed = True
        self._observer.published(version, self.at)

    # -- commands ---------------------------------------------------------------------------------------------

    def _command(self, command: c.Command) -> None:
        match command:
            case c.StartGroup():
                self._start(command)
            case c.Resume(trajectory=trajectory, attempt=attempt, slot=slot, version=version):
                request = self.requests[trajectory]
                self._take_off(request, "resumed elsewhere")
                request.attempt, request.version = attempt, version
                self._place(request, slot)
            case c.Move(target=target):
                for trajectory in command.trajectories:
                    request = self.requests[trajectory]
                    request.target = target
                    self.slots[target].incoming[trajectory] = request
                    self._observer.request_waits(request, self.at)
            case c.Abort(trajectory=trajectory, attempt=attempt, instance=instance):
                found = self._on_slot(trajectory, attempt)
                if found is not None and instance in {one.instance for one in (found.slot, found.target) if one}:
                    self._requeue(found, "aborted")
            case c.Score(trajectory=trajectory):
                self._end(trajectory, "generated")
            case c.FailTrajectory(trajectory=trajectory, reason=reason):
                self._observer.fault("trajectory failed", f"trajectory {trajectory}", reason, self.at)
                self._end(trajectory, f"failed: {reason}")
            case c.LoadVersion(slot=slot, version=version, in_flight=in_flight):
                self.slots[slot].loading = version
                if not in_flight:
                    self.slots[slot].version = None
                self._observer.slot_changed(slot, self.slots[slot], self.at)
            case c.UnloadSlot(slot=slot):
                self.slots[slot].version = None
                self._observer.slot_changed(slot, self.slots[slot], self.at)
            case _:
                self._other_command(command)

    def _other_command(self, command: c.Command) -> None:
        match command:
            case c.Accumulate(step=step):
                self.trainer = f"training step {step}"
            case c.Apply(step=step, groups=groups):
                self.trainer = f"training step {step}"
                self._apply_step(step, groups)
            case c.Publish(version=version, attempt=attempt):
                self.trainer = f"publishing version {version}"
                self._publishing = (version, attempt)
            case c.TrainerIdles(cause=cause):
                self.trainer = _waiting(cause)
            case c.Retire(version=version):
                self._observer.retired(version, self.at)
            case c.GroupFailed(group=group, reasons=reasons):
                self._observer.fault("group failed", f"group {group}", "; ".join(reasons), self.at)
                self._group_ended(group)
            case c.GroupWithoutSignal(group=group):
                self._group_ended(group)
            case c.EvictInstance(instance=instance, reason=reason):
                self._observer.fault("instance evicted", instance, reason, self.at)
                self._instance_lost(instance)
            case c.RestartTrainer(reason=reason):
                self._observer.fault("trainer restarted", "trainer", reason, self.at)
                self._publishing = None
                self.trainer = "starting"
            case c.Stalled(waits=waits):
                self._observer.fault("no progress", "run", "; ".join(waits), self.at)
            case _:
                pass

    def _start(self, command: c.StartGroup) -> None:
        self.untrained[command.group] = command.version
        for sibling in range(self._group_size):
            trajectory = command.group * self._group_size + sibling
            request = Request(trajectory, command.group, command.version, command.version, None)
            self.requests[trajectory] = request
            self.waiting[request.group_version] += 1
            self._place(request, command.slot)

    def _apply_step(self, step: StepId, groups: tuple[GroupId, ...]) -> None:
        """A step that is trained again after a crash is not new."""
        if step in self._batches or (self.newest is not None and step < self.newest):
            return
        self._batches[step] = groups
        self._observer.step_applied(step, [step - self.untrained[group] for group in groups], self.at)

    def _group_ended(self, group: GroupId) -> None:
        del self.untrained[group]
        self._changed = True

    # -- requests ---------------------------------------------------------------------------------------------

    def _on_slot(self, trajectory: TrajectoryId, attempt: Attempt) -> Request | None:
        request = self.requests.get(trajectory)
        return request if request is not None and request.slot and request.attempt == attempt else None

    def _arriving(self, event: e.Moved | e.MoveFailed) -> list[Request]:
        """The requests of a report that still move to its target."""
        found = (self._on_slot(*one) for one in zip(event.trajectories, event.attempts, strict=True))
        return [request for request in found if request is not None and request.target == event.target]

    def _arrived(self, request: Request) -> None:
        assert request.target is not None
        target = request.target
        self._take_off(request, f"moved to {target}")
        self._place(request, target)

    def _place(self, request: Request, slot: SlotId) -> None:
        """Put a request that waits on a slot."""
        _decrement(self.waiting, request.group_version)
        self.running[request.group_version] += 1
        request.slot = slot
        self.slots[slot].requests[request.trajectory] = request
        self._changed = True
        self._observer.request_began(request, self.at)

    def _take_off(self, request: Request, outcome: str) -> None:
        """Let a request wait, if it does not do so already."""
        if request.slot is None:
            return
        self._observer.request_ended(request, self.at, outcome)
        self._end_move(request)
        del self.slots[request.slot].requests[request.trajectory]
        request.slot = None
        _decrement(self.running, request.group_version)
        self.waiting[request.group_version] += 1
        self._changed = True

    def _end_move(self, request: Request) -> None:
        if request.target is not None:
            self.slots[request.target].incoming.pop(request.trajectory, None)
            request.target = None

    def _requeue(self, request: Request, outcome: str) -> None:
        self._take_off(request, outcome)
        request.parked = False

    def _end(self, trajectory: TrajectoryId, outcome: str) -> None:
        request = self.requests.get(trajectory)
        if request is None:
            return  # generated before, and its reward failed
        self._take_off(request, outcome)
        _decrement(self.waiting, request.group_version)
        del self.requests[trajectory]
        self._changed = True


def _decrement(counts: Counter[Version], version: Version) -> None:
    counts[version] -= 1
    if not counts[version]:
        del counts[version]


def _waiting(cause: IdleCause) -> str:
    return f"waiting: {cause}"
