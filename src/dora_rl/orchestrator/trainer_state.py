"""The trainer's side: collecting a step's batch, training, publishing, and a trainer that dies and comes back.

    ABSENT -> PUBLISHING -> COLLECTING -> TRAINING -> PUBLISHING -> COLLECTING -> ...
       ^--- lost, or too late, from anywhere

Invariants:
- step n takes groups only after version n is published, and publishes n + 1;
- a group that is taken stays in its batch until that batch is published, however often the trainer restarts;
- batches since the last checkpoint are kept, so that a trainer which restarts from it trains the same again;
- `attempt` names one life of the trainer; reports of a former life are ignored.
"""

from __future__ import annotations

from enum import Enum, auto

from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.commands import Accumulate, Apply, Publish, RestartTrainer
from dora_rl.core.errors import IntegrityError
from dora_rl.core.events import Accumulated, Published, Trained
from dora_rl.core.types import SECOND, Attempt, GroupId, Nanoseconds, StepId, Version
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.group_table import GroupState
from dora_rl.orchestrator.step_rule import StepRule
from dora_rl.orchestrator.timers import Wait


class TrainerStage(Enum):
    """What the trainer is at."""

    ABSENT = auto()
    COLLECTING = auto()
    TRAINING = auto()
    PUBLISHING = auto()


class TrainerState:
    """Feeds the trainer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.stage = TrainerStage.ABSENT
        self.attempt: Attempt = 0
        self.busy_seconds: float | None = None
        """Smoothed time of a step that the trainer works; the rest it waits."""
        self.published_at: Nanoseconds = 0
        self._batch: list[GroupState] = []
        self._sent = 0
        self._rule = StepRule(0, 1)
        self._history: dict[StepId, tuple[GroupId, ...]] = {}
        self._replaying: StepId | None = None
        self._accumulating = 0
        """Groups that were sent and not reported back."""
        self._busy: Nanoseconds = 0
        self._busy_since: Nanoseconds | None = None
        self._worked_through: Nanoseconds = 0
        """When the trainer was last through with groups."""
        self._taking_seconds = 0.0
        """Smoothed time of a step up to where its groups are worked through; none where groups come at once."""
        self._life: Attempt = 0
        """The attempt in which the step began."""
        self._entered = 0
        """How often the stage has changed: names one wait."""

    # -- the trainer's life -----------------------------------------------------------------------------------

    def expect(self) -> None:
        """The run begins: a trainer is due."""
        self._enter(TrainerStage.ABSENT, "no trainer came within deadlines.train")

    def ready(self, version: Version) -> None:
        """A trainer is there with the weights of a version."""
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
        self._work(busy=False)
        self._enter(TrainerStage.ABSENT, reason)

    def overdue(self, entered: int, reason: str) -> None:
        """A deadline of the trainer has passed; if it is still in the same wait, start another."""
        if entered == self._entered:
            self._context.say(RestartTrainer(reason=reason))
            self.lost(reason)

    def checkpointed(self, version: Version) -> None:
        """A trainer will never come back with less than this version."""
        for step in [step for step in self._history if step < version]:
            del self._history[step]

    # -- the step ---------------------------------------------------------------------------------------------

    def accumulated(self, event: Accumulated) -> bool:
        """The trainer is through with some groups; with all of them it waits for more."""
        if event.attempt != self.attempt or event.step != self._context.newest or not self._accumulating:
            return False
        self._accumulating = max(0, self._accumulating - event.groups)
        self._worked_through = self._context.now
        self._work(busy=bool(self._accumulating) or self.stage is not TrainerStage.COLLECTING)
        return True

    def trained(self, event: Trained) -> None:
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
        """True if this is a new version."""
        context = self._context
        if self.stage is not TrainerStage.PUBLISHING or event.attempt != self.attempt:
            return False
        if context.newest is not None:
            if event.version != context.newest + 1:
                return False
            self._measure()
            self._history[context.newest] = tuple(group.id for group in self._batch)
            for group in self._batch:
                context.ledger.settle(group)
        self.published_at = context.now
        context.newest = event.version
        context.fingerprints[event.version] = event.fingerprint
        context.probes[event.version] = event.probe
        self._batch = []
        self._sent = 0
        self._rule = StepRule(event.version, context.config.groups_per_step)
        self._life = self.attempt
        context.pacing.begin_step(context.now)
        self._enter(TrainerStage.COLLECTING)
        return True

    def finished(self, group: GroupState) -> None:
        """A group has ended and can be trained."""
        self._context.pacing.finished(self._context.now - group.admitted_at)

    def collect(self) -> bool:
        """Take what the rule allows; True if that completed the step and training begins."""
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
            self._context.say(
                Accumulate(
                    step=step, attempt=self.attempt, groups=tuple(group.id for group in self._batch[self._sent :])
                )
            )
            self._accumulating += len(self._batch) - self._sent
            self._sent = len(self._batch)
            self._work(busy=True)
        if not complete:
            return False
        ordered = sorted(self._batch, key=lambda group: (group.version, group.id))
        self._context.say(Apply(step=self._step(), attempt=self.attempt, groups=tuple(group.id for group in ordered)))
        waited = (self._context.now - self.published_at) / SECOND
        self._context.collect_seconds += (waited - self._context.collect_seconds) / 2
        self._enter(TrainerStage.TRAINING)
        return True

    def waits_for(self) -> IdleCause:
        """Why the trainer can't go on, while it collects."""
        ledger = self._context.ledger
        if self._context.newest is None or self.stage is not TrainerStage.COLLECTING:
            return IdleCause(reason=IdleReason.STARTING)
        if self._context.drained and not ledger.live:
            return IdleCause(reason=IdleReason.FINISHED)
        for deadline in ledger.ready_deadlines():
            blocker = self._rule.blocker(deadline, ledger.due)
            if blocker is not None:
                return IdleCause(reason=IdleReason.DEADLINE, version=ledger.oldest_due(blocker))
        if not ledger.unfinished:
            return IdleCause(reason=IdleReason.NO_PROMPTS)
        oldest = min(ledger.unfinished)
        if not ledger.running and ledger.scoring:
            return IdleCause(reason=IdleReason.REWARD, version=oldest)
        return IdleCause(reason=IdleReason.ROLLOUT, version=oldest)

    def _take(self) -> None:
        ledger = self._context.ledger
        while self._rule.count < self._context.config.groups_per_step:
            deadlines = ledger.ready_deadlines()
            if not deadlines or self._rule.blocker(deadlines[0], ledger.due) is not None:
                return  # what blocks the earliest deadline blocks all later ones
            self._batch.append(ledger.take(deadlines[0], self._step()))
            self._rule.take(deadlines[0])

    def _complete(self) -> bool:
        """The batch has B groups; at the very end, all that are left."""
        if len(self._batch) == self._context.config.groups_per_step:
            return True
        last = self._context.drained and not self._context.ledger.unfinished
        return last and 0 < len(self._batch) == self._context.ledger.live

    @property
    def _streaming(self) -> bool:
        """Groups go to the trainer as they finish."""
        return self._context.streams and not self._context.fleet.sharing

    def _measure(self) -> None:
        """A step has ended: note how long the trainer worked for it and waited."""
        self._work(busy=False)
        now, pacing = self._context.now, self._context.pacing
        seconds, self._busy = self._busy / SECOND, 0
        taking = max(0.0, seconds - (now - self._worked_through) / SECOND) if self._streaming else 0.0
        # Half the weight on the last step: step times drift as lengths grow, and vary little otherwise.
        if self.busy_seconds is None:
            self.busy_seconds, self._taking_seconds = seconds, taking
        else:
            self.busy_seconds = (self.busy_seconds + seconds) / 2
            self._taking_seconds = (self._taking_seconds + taking) / 2
        if self._life == self.attempt and pacing.measured:
            waited = (now - self.published_at) / SECOND - seconds
            pacing.waited(waited / self.busy_seconds, most=self._context.policy.staleness + 1)
        pacing.timed(self.busy_seconds, self._taking_seconds)

    def _work(self, *, busy: bool) -> None:
        """Measure how long the trainer works."""
        now = self._context.now
        if self._busy_since is not None:
            self._busy += now - self._busy_since
        self._busy_since = now if busy else None

    def _replay(self, step: StepId) -> None:
        self._replaying = step
        groups = self._history[step]
        self._context.say(Accumulate(step=step, attempt=self.attempt, groups=groups))
        self._context.say(Apply(step=step, attempt=self.attempt, groups=groups))
        self._enter(TrainerStage.TRAINING)

    def _publish(self, version: Version) -> None:
        self._context.say(Publish(version=version, attempt=self.attempt))
        self._enter(TrainerStage.PUBLISHING)

    def _enter(self, stage: TrainerStage, reason: str = "") -> None:
        self.stage = stage
        self._entered += 1
        if stage is not TrainerStage.COLLECTING:
            why = reason or f"{stage.name.lower()} took longer than deadlines.train"
            self._context.wait(Wait.TRAIN, self._context.config.deadlines.train, self._entered, why)

    def _step(self) -> StepId:
        assert self._context.newest is not None
        return self._context.newest
