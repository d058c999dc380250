"""The requests on slots: starting, resuming, moving and ending them.

`slot_assignment` decides which slot serves which version, `admission` which groups begin where, and `rebalance` which
requests move.

Invariants:
- a request runs only on a slot that serves its version (in a mode that mixes versions: that serves any version);
- a request that loses its slot gets a new attempt and waits in `waiting` of its version; older versions go first;
- `requests[v]` counts the requests of version v that are on slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dora_rl.core.commands import (
    Abort,
    FailTrajectory,
    GroupFailed,
    GroupWithoutSignal,
    Move,
    Resume,
    Score,
    StartGroup,
)
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import Generated, Moved, MoveFailed, Parked, Progress, Scored, TrajectoryFailed, Unparked
from dora_rl.core.types import SECOND, Attempt, InstanceId, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import GroupStage, GroupState, Stage, TrajectoryState
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.length_predictor import LengthPredictor
from dora_rl.orchestrator.migration import PlannedMove
from dora_rl.orchestrator.timers import Wait


class RequestScheduler:
    """Starts, resumes, moves and ends requests."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.lengths = LengthPredictor(context.config.max_response_tokens)
        self.waiting: dict[Version, deque[TrajectoryState]] = {}
        """Requests without a slot, by version."""
        self.touched: dict[SlotId, SlotState] = {}
        """Slots whose load has changed since upkeep last looked at them."""
        self.group_ended = False
        """A group has ended since the last upkeep."""
        self.requests: dict[Version, int] = {}
        """Number of requests on slots, by version."""
        self.move_seconds_per_token = 0.0
        """How long moves take per token, as measured, smoothed."""
        self._moves: dict[tuple[TrajectoryId, ...], tuple[Nanoseconds, int]] = {}
        """When each move began, and its tokens."""

    # -- events -----------------------------------------------------------------------------------------------

    def progress(self, event: Progress) -> bool:
        """Record load and progress; True if some request made progress.

        A heartbeat of the instance is not enough: it may hang, or may never have received its requests.
        """
        instance = self._context.instances.by_id.get(event.instance)
        if instance is None:
            return False
        instance.kv_tokens = event.kv_tokens
        advanced = False
        for trajectory_id, tokens in event.tokens.items():
            trajectory = self._context.groups.trajectory(trajectory_id)
            if trajectory is not None and tokens > trajectory.tokens and trajectory.stage is not Stage.DONE:
                trajectory.tokens = tokens
                advanced = True
        if advanced or instance.paused or not instance.active:
            instance.progress_at = self._context.now
        return advanced

    def generated(self, event: Generated) -> bool:
        """A trajectory is complete; False if the report is late or a duplicate."""
        instance = self._record_progress(event.instance, event.kv_tokens)
        trajectory = self._on_slot(event.trajectory, event.attempt)
        if instance is None or trajectory is None:
            return False
        self._check_version(trajectory, event)
        self._take_off(trajectory)
        self._context.groups.generated(trajectory, event.tokens)
        self.lengths.observe(event.tokens)
        self._context.emit(Score(trajectory=trajectory.id))
        self._context.set_timer(Wait.SCORE, self._context.config.deadlines.score, trajectory.id)
        return True

    def scored(self, event: Scored) -> bool:
        """A trajectory has its reward; False if the report is late or a duplicate."""
        trajectory = self._context.groups.trajectory(event.trajectory)
        if trajectory is None or trajectory.stage is not Stage.SCORING:
            return False
        self._handle_ended(self._context.groups.scored(trajectory, event.reward))
        return True

    def trajectory_failed(self, event: TrajectoryFailed) -> bool:
        """A trajectory can't be finished; False if the report is late or a duplicate."""
        return self._fail(event.trajectory, event.reason)

    def _fail(self, trajectory_id: TrajectoryId, reason: str) -> bool:
        """Let a trajectory fail, if it has not ended; its siblings continue."""
        trajectory = self._context.groups.trajectory(trajectory_id)
        if trajectory is None or trajectory.stage in (Stage.DONE, Stage.FAILED):
            return False
        if trajectory.stage is Stage.QUEUED:
            self._dequeue(trajectory)
        self._abort(trajectory)
        self._take_off(trajectory)
        self._context.emit(FailTrajectory(trajectory=trajectory_id, reason=reason))
        self._handle_ended(self._context.groups.fail(trajectory, reason))
        return True

    def parked(self, event: Parked) -> bool:
        """A trajectory waits for its environment; False if the report is late."""
        trajectory = self._set_parked(event, parked=True)
        if trajectory is None:
            return False
        trajectory.parks += 1
        seconds = self._context.config.deadlines.tool
        self._context.set_timer(Wait.TOOL, seconds, trajectory.id, trajectory.attempt, trajectory.parks)
        return True

    def unparked(self, event: Unparked) -> bool:
        """The environment has answered, and the trajectory decodes again; False if the report is late."""
        return self._set_parked(event, parked=False) is not None

    def _set_parked(self, event: Parked | Unparked, *, parked: bool) -> TrajectoryState | None:
        trajectory = self._on_slot(event.trajectory, event.attempt)
        if trajectory is None or trajectory.slot is None:
            return None
        self._context.instances.park(trajectory, parked=parked)
        self._record_progress(trajectory.slot.id.instance, event.kv_tokens)
        self.touch(trajectory.slot)
        if trajectory.target is not None:
            self.touch(trajectory.target)
        return trajectory

    def score_overdue(self, trajectory_id: TrajectoryId) -> None:
        trajectory = self._context.groups.trajectory(trajectory_id)
        if trajectory is not None and trajectory.stage is Stage.SCORING:
            self._fail(trajectory_id, "reward took longer than deadlines.score")

    def tool_overdue(self, trajectory_id: TrajectoryId, attempt: Attempt, parks: int) -> None:
        trajectory = self._on_slot(trajectory_id, attempt)
        if trajectory is not None and trajectory.parked and trajectory.parks == parks:
            self._fail(trajectory_id, "environment took longer than deadlines.tool")

    # -- moves ------------------------------------------------------------------------------------------------

    def move(self, moves: Iterable[PlannedMove]) -> None:
        """Begin planned moves."""
        context = self._context
        for move in moves:
            version = move.source.version
            assert version is not None
            assert version == move.target.version
            for trajectory in move.trajectories:
                trajectory.stage = Stage.MOVING
                context.instances.begin_move(trajectory, move.target)
            trajectories = tuple(trajectory.id for trajectory in move.trajectories)
            attempts = tuple(trajectory.attempt for trajectory in move.trajectories)
            context.emit(
                Move(
                    trajectories=trajectories,
                    attempts=attempts,
                    version=version,
                    source=move.source.id,
                    target=move.target.id,
                )
            )
            context.set_timer(Wait.MOVE, context.config.deadlines.move, trajectories, attempts, move.target)
            tokens = sum(trajectory.context for trajectory in move.trajectories)
            self._moves[trajectories] = (context.now, tokens)

    def moved(self, event: Moved) -> bool:
        """Requests have arrived; those that ended or run elsewhere by now are aborted at the target."""
        accepted = False
        self._record_move_time(event.trajectories)
        for trajectory_id, attempt in zip(event.trajectories, event.attempts, strict=True):
            trajectory = self._moving_to(trajectory_id, attempt, event.target)
            if trajectory is not None:
                assert trajectory.slot is not None
                self.touch(trajectory.slot)
                self._context.instances.end_move(trajectory, arrived=True)
                trajectory.stage = Stage.RUNNING
                self.touch(trajectory.slot)
                accepted = True
            elif not self._is_at(trajectory_id, attempt, event.target):
                self._context.emit(Abort(trajectory=trajectory_id, attempt=attempt, instance=event.target.instance))
        return accepted

    def move_failed(self, event: MoveFailed) -> bool:
        """A move failed; requests that the source kept continue there, the others from their tokens."""
        accepted = False
        for trajectory_id, attempt in zip(event.trajectories, event.attempts, strict=True):
            trajectory = self._moving_to(trajectory_id, attempt, event.target)
            if trajectory is None:
                continue
            accepted = True
            if event.kept:
                assert trajectory.target is not None
                self.touch(trajectory.target)
                self._context.instances.end_move(trajectory, arrived=False)
                trajectory.stage = Stage.RUNNING
            else:
                self.requeue(trajectory)
        return accepted

    def move_overdue(
        self, trajectories: tuple[TrajectoryId, ...], attempts: tuple[Attempt, ...], target: SlotState
    ) -> None:
        """It is unknown where these requests are: they continue from their tokens."""
        self._moves.pop(trajectories, None)
        for trajectory_id, attempt in zip(trajectories, attempts, strict=True):
            trajectory = self._moving_to(trajectory_id, attempt, target.id)
            if trajectory is not None:
                self._abort(trajectory)
                self.requeue(trajectory)

    # -- losing and finding a slot ----------------------------------------------------------------------------

    def instance_lost(self, instance: InstanceState) -> None:
        """Requests that ran on the instance, or were on their way to it or from it, wait for another slot."""
        for slot in instance.slots:
            for trajectory in [*slot.requests.values(), *slot.incoming.values()]:
                self._abort(trajectory)
                self.requeue(trajectory)
            self.touched.pop(slot.id, None)

    def requeue(self, trajectory: TrajectoryState) -> None:
        """The trajectory has lost its slot; it continues on another one, as a new attempt."""
        self._take_off(trajectory)
        trajectory.attempt += 1
        trajectory.stage = Stage.QUEUED
        trajectory.parked = False
        self.waiting.setdefault(trajectory.group.version, deque()).append(trajectory)

    def resume_waiting(self) -> None:
        """Give waiting requests the room there is on slots of their version, oldest version first."""
        for version in sorted(self.waiting):
            queue = self.waiting[version]
            while queue:
                trajectory = queue[0]
                slot = self._slot_for(trajectory)
                if slot is None:
                    break
                queue.popleft()
                self._resume(trajectory, slot)
            if not queue:
                del self.waiting[version]

    def serving(self, version: Version) -> Version:
        """The version of the slots on which requests of this version run."""
        if self._context.mode.mixes_versions:
            assert self._context.newest is not None
            return self._context.newest
        return version

    def start(self, version: Version, slot: SlotState) -> None:
        """Admit the next prompt under a version and begin its group on a slot."""
        context = self._context
        prompt = context.prompts.popleft()
        group = context.groups.admit(prompt, version, version + context.policy.staleness, slot, context.now)
        for trajectory in group.trajectories:
            context.instances.place(trajectory, slot)
        slot.instance.kv_tokens += prompt.tokens + context.config.group_size
        self.requests[version] = self.requests.get(version, 0) + context.config.group_size
        self.touch(slot)
        context.emit(StartGroup(group=group.id, prompt=prompt, version=version, slot=slot.id))

    def touch(self, slot: SlotState) -> None:
        """The slot's load has changed."""
        self.touched[slot.id] = slot

    # -- inside -----------------------------------------------------------------------------------------------

    def _slot_for(self, trajectory: TrajectoryState) -> SlotState | None:
        """The emptiest slot of the trajectory's version that has room for it."""
        share = 1.0 - self._context.config.kv_headroom
        best: SlotState | None = None
        for slot in self._context.instances.slots_of(self.serving(trajectory.group.version)).values():
            if not slot.open or slot.serving is None:
                continue
            fits = slot.instance.has_room(1, trajectory.context, share)
            # An instance with nothing on it takes any request, else one that fills it could wait for ever.
            fits = fits or not slot.instance.active
            if fits and (best is None or slot.instance.load < best.instance.load):
                best = slot
        return best

    def _resume(self, trajectory: TrajectoryState, slot: SlotState) -> None:
        context = self._context
        assert slot.version is not None
        trajectory.stage = Stage.RUNNING
        context.instances.place(trajectory, slot)
        slot.instance.kv_tokens += trajectory.context
        version = trajectory.group.version
        self.requests[version] = self.requests.get(version, 0) + 1
        self.touch(slot)
        context.emit(
            Resume(
                trajectory=trajectory.id,
                attempt=trajectory.attempt,
                prompt=trajectory.group.prompt,
                version=slot.version,
                slot=slot.id,
            )
        )

    def _take_off(self, trajectory: TrajectoryState) -> None:
        """Take the trajectory off its slot, if it has one, and off the slot it moves to."""
        slots = [slot for slot in (trajectory.slot, trajectory.target) if slot is not None]
        if not slots:
            return
        self._context.instances.take_off(trajectory)
        version = trajectory.group.version
        self.requests[version] -= 1
        if not self.requests[version]:
            del self.requests[version]
        for slot in slots:
            if not slot.instance.lost:
                self.touch(slot)

    def _record_move_time(self, trajectories: tuple[TrajectoryId, ...]) -> None:
        began, tokens = self._moves.pop(trajectories, (self._context.now, 0))
        if tokens:
            seconds = (self._context.now - began) / SECOND / tokens
            self.move_seconds_per_token += (seconds - self.move_seconds_per_token) / 8

    def _dequeue(self, trajectory: TrajectoryState) -> None:
        queue = self.waiting[trajectory.group.version]
        queue.remove(trajectory)
        if not queue:
            del self.waiting[trajectory.group.version]

    def _abort(self, trajectory: TrajectoryState) -> None:
        """Abort the trajectory on each instance that may hold it."""
        for slot in (trajectory.slot, trajectory.target):
            if slot is not None and not slot.instance.lost:
                self._context.emit(
                    Abort(trajectory=trajectory.id, attempt=trajectory.attempt, instance=slot.id.instance)
                )

    def _handle_ended(self, group: GroupState | None) -> None:
        """A group has ended, if there is one: it is ready to be trained, has failed, or has no signal."""
        if group is None:
            return
        self.group_ended = True
        if group.stage is GroupStage.FAILED:
            self._context.emit(GroupFailed(group=group.id, reasons=tuple(group.reasons)))
            return
        self._context.pacing.record_latency(self._context.now - group.admitted_at)
        if group.stage is GroupStage.NO_SIGNAL:
            assert group.common_reward is not None
            self._context.emit(GroupWithoutSignal(group=group.id, reward=group.common_reward))

    def _record_progress(self, instance_id: InstanceId, kv_tokens: int | None) -> InstanceState | None:
        """A request of the instance made progress; `kv_tokens` is its KV load, if known."""
        instance = self._context.instances.by_id.get(instance_id)
        if instance is not None:
            instance.progress_at = self._context.now
            instance.kv_tokens = instance.kv_tokens if kv_tokens is None else kv_tokens
        return instance

    def _on_slot(self, trajectory_id: TrajectoryId, attempt: Attempt) -> TrajectoryState | None:
        """The trajectory, if it is on a slot in this attempt."""
        trajectory = self._context.groups.trajectory(trajectory_id)
        if trajectory is None or trajectory.attempt != attempt:
            return None
        return trajectory if trajectory.stage in (Stage.RUNNING, Stage.MOVING) else None

    def _moving_to(self, trajectory_id: TrajectoryId, attempt: Attempt, target: SlotId) -> TrajectoryState | None:
        """The trajectory, if it moves to this slot in this attempt."""
        trajectory = self._on_slot(trajectory_id, attempt)
        if trajectory is None or trajectory.target is None or trajectory.target.id != target:
            return None
        return trajectory

    def _is_at(self, trajectory_id: TrajectoryId, attempt: Attempt, slot: SlotId) -> bool:
        trajectory = self._on_slot(trajectory_id, attempt)
        return trajectory is not None and trajectory.slot is not None and trajectory.slot.id == slot

    def _check_version(self, trajectory: TrajectoryState, event: Generated) -> None:
        """C1: the engine must have served the version that the trajectory was tagged with."""
        served = event.version
        expected = self._context.fingerprints.get(served)
        single = self._context.mode.mixes_versions or served == trajectory.group.version
        if not single or event.fingerprint != expected:
            raise IntegrityError(
                f"trajectory {trajectory.id} of version {trajectory.group.version} was served by {event.instance} "
                f"from version {served} with fingerprint {event.fingerprint}, expected {expected}"
            )

    def check(self) -> None:
        """Assert that requests run on slots of their version, and that the counts and queues agree with them."""
        mixes = self._context.mode.mixes_versions
        requests: dict[Version, int] = {}
        for slot in self._context.instances.slots():
            for trajectory in slot.requests.values():
                version = trajectory.group.version
                requests[version] = requests.get(version, 0) + 1
                assert mixes or slot.version == version, f"{trajectory} of version {version} is on {slot}"
            for trajectory in slot.incoming.values():
                assert slot.serving == trajectory.group.version, f"{trajectory} moves to {slot} of another version"
        assert self.requests == requests, f"counts of requests on slots: {self.requests}, not {requests}"
        queued = 0
        for version, queue in self.waiting.items():
            assert queue, f"version {version} has an empty queue"
            queued += len(queue)
            for trajectory in queue:
                assert trajectory.stage is Stage.QUEUED, f"{trajectory} waits for a slot"
                assert trajectory.group.version == version, f"{trajectory} waits for version {version}"
        running = self._context.groups.running
        assert sum(requests.values()) + queued == running, f"{queued} requests queue, {requests} run, not {running}"
        assert not self.touched, f"upkeep has not looked at slots {self.touched.keys()}"
        assert not self.group_ended, "a group has ended without upkeep"
        self.lengths.check()
