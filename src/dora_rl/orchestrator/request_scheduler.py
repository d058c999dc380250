"""The rollout side: the life of requests on slots. Which slot serves which version is decided in `partition`, which
groups begin where in `admission`.

Invariants:
- a request runs only on a slot that serves its version (in mode `partial`: that serves any version);
- a request that loses its slot gets a new attempt and waits in `waiting` of its version, oldest version first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from dora_rl.core.commands import Abort, FailTrajectory, GroupFailed, Move, Resume, Score, StartGroup
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import Generated, Moved, MoveFailed, Progress
from dora_rl.core.types import SECOND, Attempt, InstanceId, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import GroupState, Stage, TrajectoryState
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.length_predictor import LengthPredictor
from dora_rl.orchestrator.migration import PlannedMove
from dora_rl.orchestrator.timers import Wait
from dora_rl.orchestrator.trainer_state import TrainerState


class RequestScheduler:
    """Starts, resumes, moves and ends requests."""

    def __init__(self, context: Context, training: TrainerState) -> None:
        self._context = context
        self._training = training
        self.lengths = LengthPredictor(context.config.max_response_tokens)
        self.waiting: dict[Version, deque[TrajectoryState]] = {}
        self.touched: dict[SlotId, SlotState] = {}
        """Slots whose load has changed since they were last looked at."""
        self.group_ended = False
        """Some group has ended since the last upkeep."""
        self.requests: dict[Version, int] = {}
        """Requests on slots, by version."""
        self.move_seconds_per_token = 0.0
        """Smoothed, as seen."""
        self._moves: dict[tuple[TrajectoryId, ...], tuple[Nanoseconds, int]] = {}
        """When each move began, and its tokens."""

    # -- reports ----------------------------------------------------------------------------------------------

    def progress(self, event: Progress) -> bool:
        """Take notice of load and progress; True if some request moved on.

        That the instance lives is not enough: it may hang, or never have been told of its requests.
        """
        instance = self._context.fleet.instances.get(event.instance)
        if instance is None:
            return False
        instance.kv_tokens = event.kv_tokens
        advanced = False
        for trajectory_id, tokens in event.tokens.items():
            trajectory = self._context.ledger.trajectory(trajectory_id)
            if trajectory is not None and tokens > trajectory.tokens and trajectory.stage is not Stage.DONE:
                trajectory.tokens = tokens
                advanced = True
        if advanced or instance.paused or not instance.active:
            instance.heard = self._context.now
        return advanced

    def generated(self, event: Generated) -> bool:
        """A trajectory is complete; False if the report is late or a duplicate."""
        instance = self._heard(event.instance, event.kv_tokens)
        trajectory = self._running(event.trajectory, event.attempt)
        if instance is None or trajectory is None:
            return False
        self._prove(trajectory, event)
        self._remove(trajectory)
        self._context.ledger.generated(trajectory, event.tokens)
        self.lengths.observe(event.tokens)
        self._context.say(Score(trajectory=trajectory.id))
        self._context.wait(Wait.SCORE, self._context.config.deadlines.score, trajectory.id)
        return True

    def scored(self, trajectory_id: TrajectoryId) -> bool:
        trajectory = self._context.ledger.trajectory(trajectory_id)
        if trajectory is None or trajectory.stage is not Stage.SCORING:
            return False
        self._announce(self._context.ledger.scored(trajectory))
        return True

    def failed(self, trajectory_id: TrajectoryId, reason: str) -> bool:
        """A verdict that a trajectory can't be finished; its siblings go on."""
        trajectory = self._context.ledger.trajectory(trajectory_id)
        if trajectory is None or trajectory.stage in (Stage.DONE, Stage.FAILED):
            return False
        if trajectory.stage is Stage.QUEUED:
            self._dequeue(trajectory)
        self._abort(trajectory)
        self._remove(trajectory)
        self._context.say(FailTrajectory(trajectory=trajectory_id, reason=reason))
        self._announce(self._context.ledger.fail(trajectory, reason))
        return True

    def parked(self, trajectory_id: TrajectoryId, attempt: Attempt, kv_tokens: int | None, *, parked: bool) -> bool:
        """A trajectory began, or ended, waiting for its environment."""
        trajectory = self._running(trajectory_id, attempt)
        if trajectory is None or trajectory.slot is None:
            return False
        self._context.fleet.park(trajectory, parked=parked)
        self._heard(trajectory.slot.id.instance, kv_tokens)
        self.touch(trajectory.slot)
        if trajectory.target is not None:
            self.touch(trajectory.target)
        if parked:
            trajectory.parks += 1
            self._context.wait(Wait.TOOL, self._context.config.deadlines.tool, trajectory_id, attempt, trajectory.parks)
        return True

    def overdue_score(self, trajectory_id: TrajectoryId) -> None:
        trajectory = self._context.ledger.trajectory(trajectory_id)
        if trajectory is not None and trajectory.stage is Stage.SCORING:
            self.failed(trajectory_id, "reward took longer than deadlines.score")

    def overdue_tool(self, trajectory_id: TrajectoryId, attempt: Attempt, parks: int) -> None:
        trajectory = self._running(trajectory_id, attempt)
        if trajectory is not None and trajectory.parked and trajectory.parks == parks:
            self.failed(trajectory_id, "environment took longer than deadlines.tool")

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
                context.fleet.begin_move(trajectory, move.target)
            trajectories = tuple(trajectory.id for trajectory in move.trajectories)
            attempts = tuple(trajectory.attempt for trajectory in move.trajectories)
            context.say(
                Move(
                    trajectories=trajectories,
                    attempts=attempts,
                    version=version,
                    source=move.source.id,
                    target=move.target.id,
                )
            )
            context.wait(Wait.MOVE, context.config.deadlines.move, trajectories, attempts, move.target)
            tokens = sum(trajectory.context for trajectory in move.trajectories)
            self._moves[trajectories] = (context.now, tokens)

    def moved(self, event: Moved) -> bool:
        """Requests have arrived; ones that meanwhile ended or run elsewhere are forgotten at the target."""
        accepted = False
        self._learn_move_cost(event.trajectories)
        for trajectory_id, attempt in zip(event.trajectories, event.attempts, strict=True):
            trajectory = self._moving(trajectory_id, attempt, event.target)
            if trajectory is not None:
                assert trajectory.slot is not None
                self.touch(trajectory.slot)
                self._context.fleet.end_move(trajectory, arrived=True)
                trajectory.stage = Stage.RUNNING
                self.touch(trajectory.slot)
                accepted = True
            elif not self._is_at(trajectory_id, attempt, event.target):
                self._context.say(Abort(trajectory=trajectory_id, attempt=attempt, instance=event.target.instance))
        return accepted

    def move_failed(self, event: MoveFailed) -> bool:
        accepted = False
        for trajectory_id, attempt in zip(event.trajectories, event.attempts, strict=True):
            trajectory = self._moving(trajectory_id, attempt, event.target)
            if trajectory is None:
                continue
            accepted = True
            if event.kept:
                assert trajectory.target is not None
                self.touch(trajectory.target)
                self._context.fleet.end_move(trajectory, arrived=False)
                trajectory.stage = Stage.RUNNING
            else:
                self.requeue(trajectory)
        return accepted

    def overdue_move(
        self, trajectories: tuple[TrajectoryId, ...], attempts: tuple[Attempt, ...], target: SlotState
    ) -> None:
        """Nobody knows where these requests are: they go on from their tokens."""
        self._moves.pop(trajectories, None)
        for trajectory_id, attempt in zip(trajectories, attempts, strict=True):
            trajectory = self._moving(trajectory_id, attempt, target.id)
            if trajectory is not None:
                self._abort(trajectory)
                self.requeue(trajectory)

    # -- losing and finding a place ---------------------------------------------------------------------------

    def evict(self, instance: InstanceState) -> None:
        """The instance is gone; what ran there, or was on its way there or from there, waits for another place."""
        for slot in instance.slots:
            for trajectory in [*slot.requests.values(), *slot.incoming.values()]:
                self._abort(trajectory)
                self.requeue(trajectory)
            self.touched.pop(slot.id, None)

    def requeue(self, trajectory: TrajectoryState) -> None:
        """The trajectory has no place any more; it goes on elsewhere, as a new attempt."""
        self._remove(trajectory)
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
                slot = self._place_for(trajectory)
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
        group = context.ledger.admit(prompt, version, version + context.policy.staleness, slot, context.now)
        for trajectory in group.trajectories:
            context.fleet.place(trajectory, slot)
        slot.instance.kv_tokens += prompt.tokens + context.config.group_size
        self.requests[version] = self.requests.get(version, 0) + context.config.group_size
        self.touch(slot)
        context.say(StartGroup(group=group.id, prompt=prompt, version=version, slot=slot.id))

    def touch(self, slot: SlotState) -> None:
        """The slot's load has changed."""
        self.touched[slot.id] = slot

    # -- inside -----------------------------------------------------------------------------------------------

    def _place_for(self, trajectory: TrajectoryState) -> SlotState | None:
        share = 1.0 - self._context.config.kv_headroom
        best: SlotState | None = None
        for slot in self._context.fleet.of(self.serving(trajectory.group.version)).values():
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
        context.fleet.place(trajectory, slot)
        slot.instance.kv_tokens += trajectory.context
        version = trajectory.group.version
        self.requests[version] = self.requests.get(version, 0) + 1
        self.touch(slot)
        context.say(
            Resume(
                trajectory=trajectory.id,
                attempt=trajectory.attempt,
                prompt=trajectory.group.prompt,
                version=slot.version,
                slot=slot.id,
            )
        )

    def _remove(self, trajectory: TrajectoryState) -> None:
        """Take the trajectory off its slot, if it has one, and off the slot it moves to."""
        slots = [slot for slot in (trajectory.slot, trajectory.target) if slot is not None]
        if not slots:
            return
        self._context.fleet.remove(trajectory)
        version = trajectory.group.version
        self.requests[version] -= 1
        if not self.requests[version]:
            del self.requests[version]
        for slot in slots:
            if not slot.instance.lost:
                self.touch(slot)

    def _learn_move_cost(self, trajectories: tuple[TrajectoryId, ...]) -> None:
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
        """Tell whoever may hold the trajectory to forget it."""
        for slot in (trajectory.slot, trajectory.target):
            if slot is not None and not slot.instance.lost:
                self._context.say(
                    Abort(trajectory=trajectory.id, attempt=trajectory.attempt, instance=slot.id.instance)
                )

    def _announce(self, ended: GroupState | None) -> None:
        if ended is None:
            return
        self.group_ended = True
        if ended.id in self._context.ledger.groups:
            self._training.finished(ended)
        else:
            self._context.say(GroupFailed(group=ended.id, reasons=tuple(ended.reasons)))

    def _heard(self, instance_id: InstanceId, kv_tokens: int | None) -> InstanceState | None:
        instance = self._context.fleet.instances.get(instance_id)
        if instance is not None:
            instance.heard = self._context.now
            instance.kv_tokens = instance.kv_tokens if kv_tokens is None else kv_tokens
        return instance

    def _running(self, trajectory_id: TrajectoryId, attempt: Attempt) -> TrajectoryState | None:
        """The trajectory, if it is on a slot in this attempt."""
        trajectory = self._context.ledger.trajectory(trajectory_id)
        if trajectory is None or trajectory.attempt != attempt:
            return None
        return trajectory if trajectory.stage in (Stage.RUNNING, Stage.MOVING) else None

    def _moving(self, trajectory_id: TrajectoryId, attempt: Attempt, target: SlotId) -> TrajectoryState | None:
        trajectory = self._running(trajectory_id, attempt)
        if trajectory is None or trajectory.target is None or trajectory.target.id != target:
            return None
        return trajectory

    def _is_at(self, trajectory_id: TrajectoryId, attempt: Attempt, slot: SlotId) -> bool:
        trajectory = self._running(trajectory_id, attempt)
        return trajectory is not None and trajectory.slot is not None and trajectory.slot.id == slot

    def _prove(self, trajectory: TrajectoryState, event: Generated) -> None:
        """C1: the engine must have served what the trajectory was tagged with."""
        served = event.version
        expected = self._context.fingerprints.get(served)
        single = self._context.mode.mixes_versions or served == trajectory.group.version
        if not single or event.fingerprint != expected:
            raise IntegrityError(
                f"trajectory {trajectory.id} of version {trajectory.group.version} was served by {event.instance} "
                f"from version {served} with fingerprint {event.fingerprint}, expected {expected}"
            )
