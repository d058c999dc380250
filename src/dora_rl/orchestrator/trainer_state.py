"""The trainer: collecting a step's batch, training, publishing, and a trainer that dies and comes back.

    ABSENT -> PUBLISHING -> COLLECTING -> TRAINING -> PUBLISHING -> COLLECTING -> ...
       ^--- lost, or overdue, from any stage

Invariants:
- step n takes groups only after version n is published, and publishes n + 1;
- a group that is taken stays in its batch until that batch is published, however often the trainer restarts;
- batches since the last checkpoint are kept, so that a trainer that restarts from it trains the same batches again;
- `attempt` grows with each restart of the trainer; reports of earlier attempts are ignored.
"""

from __future__ import annotations

from enum import Enum, auto

from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.commands import Accumulate, Apply, Publish, RestartTrainer
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import Accumulated, Published, Trained
from dora_rl.core.types import SECOND, Attempt, GroupId, Nanoseconds, StepId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import GroupStage, GroupState
from dora_rl.orchestrator.step_rule import StepRule
from dora_rl.orchestrator.timers import Wait


class TrainerStage(Enum):
    """Stage of the trainer."""

    ABSENT = auto()
    COLLECTING = auto()
    TRAINING = auto()
    PUBLISHING = auto()


class TrainerState:
    """Decides what the trainer gets, and when."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.stage = TrainerStage.ABSENT
        self.attempt: Attempt = 0
        self.published_at: Nanoseconds = 0
        """When the newest version was published, which is when the step began."""
        self._batch: list[GroupState] = []
        self._sent = 0
        """How many groups of the batch the trainer was sent, in this attempt."""
        self._rule = StepRule(0, 1)
        self._history: dict[StepId, tuple[GroupId, ...]] = {}
        """Batches since the last checkpoint."""
        self._replaying: StepId | None = None
        """The step of an earlier batch that is trained again."""
        self._accumulating = 0
        """Groups that were sent and not reported back."""
        self._busy: Nanoseconds = 0
        """How long the trainer has worked for this step so far."""
        self._busy_since: Nanoseconds | None = None
        self._step_attempt: Attempt = 0
        """The attempt in which the step began."""
        self._entered = 0
        """How often the stage has changed, which identifies one wait."""

    # -- restarts ---------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """The run begins: a trainer is due."""
        self._enter(TrainerStage.ABSENT, "no trainer came within deadlines.train")

    def ready(self, version: Version) -> None:
        """A trainer has started with the weights of a version."""
        context = self._context
        self.attempt += 1
        self._sent = 0
        self._accumulating = 0
        self._replaying = None
        newest = context.newest
        if newest is None or (version == newest + 1 and self._complete()):
            self._publish(version)
        elif version == newest:
            self._enter(TrainerStage.COLLECTING)
        elif version < newest and all(step in self._history for step in range(version, newest)):
            self._replay(version)
        else:
            raise IntegrityError(
                f"a trainer came back with version {version}; version {newest} is published and the batches kept "
                f"start with step {min(self._history, default=newest)}"
            )

    def lost(self, reason: str) -> None:
        """The trainer is gone; it is asked for again until it comes back."""
        self._measure_work(busy=False)
        self._enter(TrainerStage.ABSENT, reason)

    def overdue(self, entered: int, reason: str) -> None:
        """A deadline of the trainer has passed; restart it if it is still in the same wait."""
        if entered == self._entered:
            self._context.emit(RestartTrainer(reason=reason))
            self.lost(reason)

    def checkpointed(self, version: Version) -> None:
        """A trainer will never come back with an older version than this."""
        for step in [step for step in self._history if step < version]:
            del self._history[step]

    # -- the step ---------------------------------------------------------------------------------------------

    def accumulated(self, event: Accumulated) -> bool:
        """The trainer has accumulated some groups; if those were all, it waits for more."""
        if event.attempt != self.attempt or event.step != self._context.newest or not self._accumulating:
            return False
        self._accumulating = max(0, self._accumulating - event.groups)
        if self.stage is TrainerStage.COLLECTING and self._accumulating:
            self._context.pacing.record_spare(self._accumulating - 1)
        self._measure_work(busy=bool(self._accumulating) or self.stage is not TrainerStage.COLLECTING)
        return True

    def trained(self, event: Trained) -> None:
        """The trainer has applied a step: publish it, or train the next one of those that are trained again."""
        if self.stage is not TrainerStage.TRAINING or event.attempt != self.attempt:
            return
        if self._replaying is not None:
            if event.step != self._replaying:
                return
            newest = self._context.newest
            if event.step + 1 == newest:
                self._replaying = None
                self._enter(TrainerStage.COLLECTING)
            else:
                self._replay(event.step + 1)
        elif event.step == self._context.newest:
            self._publish(event.step + 1)

    def published(self, event: Published) -> bool:
        """The weights of a version can be loaded; True if it is a new version."""
        context = self._context
        if self.stage is not TrainerStage.PUBLISHING or event.attempt != self.attempt:
            return False
        if context.newest is not None:
            if event.version != context.newest + 1:
                return False
            self._measure_step()
            self._history[context.newest] = tuple(group.id for group in self._batch)
            for group in self._batch:
                context.groups.mark_trained(group)
        self.published_at = context.now
        context.newest = event.version
        context.fingerprints[event.version] = event.fingerprint
        context.probes[event.version] = event.probe
        self._batch = []
        self._sent = 0
        self._rule = StepRule(event.version, context.config.groups_per_step)
        self._step_attempt = self.attempt
        context.pacing.begin_step(context.now)
        started_on = 1 if self._streaming else context.config.groups_per_step
        context.pacing.record_spare(max(0, context.groups.ready - started_on))
        self._enter(TrainerStage.COLLECTING)
        return True

    def collect(self) -> bool:
        """Take the groups that the rule allows; True if that completed the batch and training begins."""
        if self.stage is not TrainerStage.COLLECTING:
            return False
        self._take()
        streaming = self._streaming
        complete = self._complete()
        if (streaming or complete) and self._sent < len(self._batch):
            step = self._step()
            if not streaming:
                # One order whatever finished first, so that the sums of a synchronous step are the same to the bit.
                self._batch.sort(key=lambda group: (group.version, group.id))
            self._context.emit(
                Accumulate(
                    step=step, attempt=self.attempt, groups=tuple(group.id for group in self._batch[self._sent :])
                )
            )
            self._accumulating += len(self._batch) - self._sent
            self._sent = len(self._batch)
            self._measure_work(busy=True)
        if not complete:
            return False
        ordered = sorted(self._batch, key=lambda group: (group.version, group.id))
        self._context.emit(Apply(step=self._step(), attempt=self.attempt, groups=tuple(group.id for group in ordered)))
        waited = (self._context.now - self.published_at) / SECOND
        self._context.collect_seconds += (waited - self._context.collect_seconds) / 2
        self._enter(TrainerStage.TRAINING)
        return True

    def waits_for(self) -> IdleCause:
        """Why the trainer can't continue, while it collects."""
        groups = self._context.groups
        if self._context.newest is None or self.stage is not TrainerStage.COLLECTING:
            return IdleCause(reason=IdleReason.STARTING)
        if self._context.drained and not groups.live:
            return IdleCause(reason=IdleReason.FINISHED)
        for deadline in groups.ready_deadlines():
            blocker = self._rule.blocker(deadline, groups.due)
            if blocker is not None:
                return IdleCause(reason=IdleReason.DEADLINE, version=groups.oldest_due(blocker))
        if not groups.unfinished:
            return IdleCause(reason=IdleReason.NO_PROMPTS)
        oldest = min(groups.unfinished)
        if not groups.running and groups.scoring:
            return IdleCause(reason=IdleReason.REWARD, version=oldest)
        return IdleCause(reason=IdleReason.ROLLOUT, version=oldest)

    def _take(self) -> None:
        groups = self._context.groups
        while self._rule.count < self._context.config.groups_per_step:
            deadlines = groups.ready_deadlines()
            if not deadlines or self._rule.blocker(deadlines[0], groups.due) is not None:
                return  # what blocks the earliest deadline blocks all later ones
            self._batch.append(groups.take(deadlines[0], self._step()))
            self._rule.take(deadlines[0])

    def _complete(self) -> bool:
        """The batch has B groups; at the end of the data, all groups that are left."""
        if len(self._batch) == self._context.config.groups_per_step:
            return True
        last = self._context.drained and not self._context.groups.unfinished
        return last and 0 < len(self._batch) == self._context.groups.live

    @property
    def _streaming(self) -> bool:
        """Groups go to the trainer as they finish."""
        return self._context.streams and not self._context.instances.sharing

    def _measure_step(self) -> None:
        """A step has ended: record how long the trainer worked for it, unless it was restarted in between."""
        self._measure_work(busy=False)
        seconds, self._busy = self._busy / SECOND, 0
        if self._step_attempt != self.attempt:
            return
        self._context.pacing.end_step(seconds, self._context.policy.staleness)

    def _measure_work(self, *, busy: bool) -> None:
        """Add up how long the trainer works; `busy` says whether it works from now on."""
        now = self._context.now
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if busy else None
        self._measure_wait()

    def _measure_wait(self) -> None:
        """Tell the pacing whether the trainer waits for groups."""
        waits = self.stage is TrainerStage.COLLECTING and self._busy_since is None
        self._context.pacing.trainer_waits(self._context.now, waits=waits)

    def _replay(self, step: StepId) -> None:
        self._replaying = step
        groups = self._history[step]
        self._context.emit(Accumulate(step=step, attempt=self.attempt, groups=groups))
        self._context.emit(Apply(step=step, attempt=self.attempt, groups=groups))
        self._enter(TrainerStage.TRAINING)

    def _publish(self, version: Version) -> None:
        self._context.emit(Publish(version=version, attempt=self.attempt))
        self._enter(TrainerStage.PUBLISHING)

    def _enter(self, stage: TrainerStage, reason: str = "") -> None:
        """Change the stage; `reason` is given if the trainer stays in it for too long."""
        self.stage = stage
        self._entered += 1
        self._measure_wait()
        if stage is not TrainerStage.COLLECTING:
            reason = reason or f"{stage.name.lower()} took longer than deadlines.train"
            self._context.set_timer(Wait.TRAIN, self._context.config.deadlines.train, self._entered, reason)

    def _step(self) -> StepId:
        assert self._context.newest is not None
        return self._context.newest

    def check(self) -> None:
        """Assert that the batch, the group table and the step rule agree."""
        groups, newest = self._context.groups, self._context.newest
        taken = [group.id for group in groups.by_id.values() if group.stage is GroupStage.TAKEN]
        assert sorted(group.id for group in self._batch) == taken, f"the batch {self._batch} is not {taken}"
        assert all(group.step == newest for group in self._batch), f"{self._batch} is not of step {newest}"
        assert self._rule.count == len(self._batch), f"{self._rule.count} groups are counted in {self._batch}"
        assert 0 <= self._sent <= len(self._batch), f"{self._sent} groups are sent of {len(self._batch)}"
        assert self._accumulating >= 0, f"{self._accumulating} groups are sent and not reported back"
        self._rule.check(groups.due)
        if self.stage is TrainerStage.TRAINING and self._replaying is None:
            assert self._complete(), "an incomplete batch is in training"
            assert self._sent == len(self._batch), "the trainer was not sent the whole batch"
        assert self._replaying is None or self._replaying in self._history, f"step {self._replaying} is not kept"
        if newest is not None:
            # A trainer may come back with any version from the first kept step's on.
            kept = sorted(self._history)
            assert not kept or kept == list(range(kept[0], newest)), f"batches {kept} are kept before step {newest}"
        else:
            assert not self._batch, "a step has begun before a version was published"
