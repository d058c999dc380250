"""The state of every admitted prompt: groups and trajectories, and the counts that the rules need.

    trajectory  QUEUED <-> RUNNING <-> MOVING -> SCORING -> DONE
                any of them ------------------------------> FAILED
    group       OPEN -> READY -> TAKEN -> trained
                OPEN -> failed, or ended without signal

Invariants:
- a trajectory belongs to one group, and a group has one version and one deadline; neither ever changes;
- a group is READY when all its trajectories have ended and enough of them survived; it fails when too few survived;
- with dynamic sampling, a group that would be READY and whose survivors all have the same reward ends without signal
  instead, if it is among the first `dynamic_sampling` * B groups of its version. Which groups those are is known at
  their admission, so what is trained does not depend on the order in which groups end;
- one step takes a READY group, which is then TAKEN; it is trained when that step's weights are published;
- `untrained[v]` counts the groups of version v that are OPEN, READY or TAKEN, and `unfinished[v]` those that are OPEN;
  `due[d]` counts the untrained groups by deadline;
- the table holds the untrained groups only: one that is trained, fails or ends without signal leaves it. Each group
  does exactly one of these, so admitted = trained + failed + without signal + live.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dora_rl.core.types import Attempt, GroupId, Nanoseconds, Prompt, StepId, TrajectoryId, Version

if TYPE_CHECKING:
    from dora_rl.orchestrator.instances import SlotState


class Stage(Enum):
    """Stage of a trajectory."""

    QUEUED = auto()
    """Waits for a slot, since it lost the one that it had."""
    RUNNING = auto()
    MOVING = auto()
    SCORING = auto()
    DONE = auto()
    FAILED = auto()


class GroupStage(Enum):
    """Stage of a group, until it is trained."""

    OPEN = auto()
    READY = auto()
    TAKEN = auto()
    FAILED = auto()
    """It has left the table: too few of its trajectories survived."""
    NO_SIGNAL = auto()
    """It has left the table: its rewards are all equal, so it is replaced."""


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One trajectory of an untrained group."""

    id: TrajectoryId
    group: GroupState = field(repr=False)
    slot: SlotState | None = field(default=None, repr=False)
    """The slot it runs on; the source while it moves."""
    target: SlotState | None = field(default=None, repr=False)
    """The slot it moves to."""
    stage: Stage = Stage.RUNNING
    attempt: Attempt = 0
    tokens: int = 0
    """Response tokens, as of the last report."""
    reward: float | None = None
    """Its reward, once it is DONE."""
    parked: bool = False
    """It waits for its environment and does not decode."""
    parks: int = 0
    """How often it was parked, which identifies one wait."""

    @property
    def context(self) -> int:
        """Tokens of KV cache that it holds."""
        return self.group.prompt.tokens + self.tokens


@dataclass(slots=True, eq=False)
class GroupState:
    """One untrained group."""

    id: GroupId
    prompt: Prompt
    version: Version
    deadline: StepId
    """The last step that may train it: its version + the bound under which it was admitted."""
    trajectories: list[TrajectoryState] = field(default_factory=list, repr=False)
    stage: GroupStage = GroupStage.OPEN
    open: int = 0
    """Number of trajectories that have not ended."""
    survivors: int = 0
    """Number of trajectories that ended with a reward."""
    reasons: list[str] = field(default_factory=list)
    """Why trajectories failed."""
    step: StepId | None = None
    """The step that took it."""
    admitted_at: Nanoseconds = 0
    replaceable: bool = False
    """It ends without signal if its rewards are all equal."""

    @property
    def common_reward(self) -> float | None:
        """The reward that all survivors have; None if their rewards differ, or nothing survived."""
        rewards = {one.reward for one in self.trajectories if one.stage is Stage.DONE}
        return rewards.pop() if len(rewards) == 1 else None


class GroupTable:
    """All groups that are admitted and not yet trained."""

    def __init__(self, group_size: int, min_survivors: int, replaceable: int = 0) -> None:
        """Of each version, the first `replaceable` groups end without signal if their rewards are all equal."""
        self._group_size = group_size
        self._min_survivors = min_survivors
        self._replaceable = replaceable
        self.by_id: dict[GroupId, GroupState] = {}
        self.admitted = 0
        self.trained = 0
        self.failed = 0
        self.without_signal = 0
        """Number of groups that ended without signal."""
        self.failed_trajectories: Counter[str] = Counter()
        """Failed trajectories, by reason."""
        self.untrained: dict[Version, int] = {}
        self.unfinished: dict[Version, int] = {}
        self.due: dict[StepId, int] = {}
        self.first_due: dict[Version, StepId] = {}
        """The earliest deadline with which groups of a version were admitted, while the version has untrained ones."""
        self.running = 0
        """Number of trajectories that are QUEUED, RUNNING or MOVING."""
        self.scoring = 0
        """Number of trajectories that are SCORING."""
        self._ready: dict[StepId, list[GroupId]] = {}
        """Heaps of the READY groups, by deadline."""
        self._latest: Version | None = None
        """The version of the group admitted last. Versions are admitted in order, so older ones get no more groups."""
        self._of_latest = 0
        """How many groups of that version were admitted."""

    @property
    def kept(self) -> int:
        """Number of groups that were trained or may still be: those that need no replacement."""
        return self.admitted - self.failed - self.without_signal

    @property
    def live(self) -> int:
        """Number of groups that are admitted and neither trained nor replaced."""
        return self.kept - self.trained

    def admit(
        self, prompt: Prompt, version: Version, deadline: StepId, slot: SlotState, now: Nanoseconds
    ) -> GroupState:
        """Admit a prompt under a version. From here on it is either trained or counted as failed or without signal."""
        if version != self._latest:
            self._latest, self._of_latest = version, 0
        group = GroupState(
            id=self.admitted,
            prompt=prompt,
            version=version,
            deadline=deadline,
            open=self._group_size,
            admitted_at=now,
            replaceable=self._of_latest < self._replaceable,
        )
        self._of_latest += 1
        first = group.id * self._group_size
        group.trajectories = [
            TrajectoryState(id=first + sibling, group=group, slot=slot) for sibling in range(self._group_size)
        ]
        self.by_id[group.id] = group
        self.admitted += 1
        self.running += self._group_size
        self.untrained[version] = self.untrained.get(version, 0) + 1
        self.unfinished[version] = self.unfinished.get(version, 0) + 1
        self.due[deadline] = self.due.get(deadline, 0) + 1
        self.first_due[version] = min(deadline, self.first_due.get(version, deadline))
        return group

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryState | None:
        """A trajectory of an untrained group; None if its group has left the table or was never admitted."""
        group = self.by_id.get(trajectory // self._group_size)
        return None if group is None else group.trajectories[trajectory % self._group_size]

    def generated(self, trajectory: TrajectoryState, tokens: int) -> None:
        """The last token is sampled; the reward is due."""
        assert trajectory.stage in (Stage.QUEUED, Stage.RUNNING, Stage.MOVING)
        trajectory.stage = Stage.SCORING
        trajectory.tokens = tokens
        self.running -= 1
        self.scoring += 1

    def scored(self, trajectory: TrajectoryState, reward: float) -> GroupState | None:
        """The trajectory has its reward; returns the group if that ended it."""
        assert trajectory.stage is Stage.SCORING
        trajectory.stage = Stage.DONE
        trajectory.reward = reward
        trajectory.group.survivors += 1
        self.scoring -= 1
        return self._trajectory_ended(trajectory.group)

    def fail(self, trajectory: TrajectoryState, reason: str) -> GroupState | None:
        """The trajectory can't be finished; returns the group if that ended it."""
        assert trajectory.stage not in (Stage.DONE, Stage.FAILED)
        if trajectory.stage is Stage.SCORING:
            self.scoring -= 1
        else:
            self.running -= 1
        trajectory.stage = Stage.FAILED
        trajectory.group.reasons.append(reason)
        self.failed_trajectories[reason] += 1
        return self._trajectory_ended(trajectory.group)

    def _trajectory_ended(self, group: GroupState) -> GroupState | None:
        group.open -= 1
        if group.open:
            return None
        self._decrement(self.unfinished, group.version)
        if group.survivors < self._min_survivors:
            group.stage = GroupStage.FAILED
            self.failed += 1
            self._remove(group)
        elif group.replaceable and group.common_reward is not None:
            group.stage = GroupStage.NO_SIGNAL
            self.without_signal += 1
            self._remove(group)
        else:
            group.stage = GroupStage.READY
            heapq.heappush(self._ready.setdefault(group.deadline, []), group.id)
        return group

    @property
    def ready(self) -> int:
        """Number of READY groups."""
        return sum(map(len, self._ready.values()))

    def ready_deadlines(self) -> list[StepId]:
        """Deadlines of READY groups, earliest first."""
        return sorted(self._ready)

    def oldest_due(self, deadline: StepId) -> Version:
        """The oldest version that is unfinished and has groups due by this step."""
        due = (version for version in self.unfinished if self.first_due[version] <= deadline)
        return min(due, default=min(self.untrained))

    def take(self, deadline: StepId, step: StepId) -> GroupState:
        """A step takes the READY group with this deadline that was admitted first."""
        group = self.by_id[heapq.heappop(self._ready[deadline])]
        if not self._ready[deadline]:
            del self._ready[deadline]
        assert group.stage is GroupStage.READY
        assert group.version <= step <= group.deadline, f"group {group.id} in step {step} breaks its bound"
        group.stage = GroupStage.TAKEN
        group.step = step
        return group

    def mark_trained(self, group: GroupState) -> None:
        """The weights of the step that took the group are published."""
        assert group.stage is GroupStage.TAKEN
        self.trained += 1
        self._remove(group)

    def _remove(self, group: GroupState) -> None:
        self._decrement(self.untrained, group.version)
        self._decrement(self.due, group.deadline)
        if group.version not in self.untrained:
            del self.first_due[group.version]
        del self.by_id[group.id]

    @staticmethod
    def _decrement(counts: dict[int, int], key: int) -> None:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]

    def check(self) -> None:
        """Assert that the counts agree with the groups and trajectories that they count."""
        untrained: dict[Version, int] = {}
        unfinished: dict[Version, int] = {}
        due: dict[StepId, int] = {}
        ready: dict[StepId, list[GroupId]] = {}
        running = scoring = 0
        for group in self.by_id.values():
            untrained[group.version] = untrained.get(group.version, 0) + 1
            due[group.deadline] = due.get(group.deadline, 0) + 1
            if group.stage is GroupStage.OPEN:
                unfinished[group.version] = unfinished.get(group.version, 0) + 1
            elif group.stage is GroupStage.READY:
                ready.setdefault(group.deadline, []).append(group.id)
            open_, scoring_ = self._check_group(group)
            running += open_ - scoring_
            scoring += scoring_
            assert group.version <= group.deadline, group
            assert self.first_due[group.version] <= group.deadline, group
        ended = self.trained + self.failed + self.without_signal
        assert self.admitted == ended + len(self.by_id), f"{self.admitted} groups were admitted, {ended} have ended"
        assert self.live == len(self.by_id), f"{self.live} groups are counted as live, {len(self.by_id)} are"
        assert self.untrained == untrained, f"counts of untrained groups: {self.untrained}, not {untrained}"
        assert self.unfinished == unfinished, f"counts of unfinished groups: {self.unfinished}, not {unfinished}"
        assert self.due == due, f"counts of groups by deadline: {self.due}, not {due}"
        assert self.first_due.keys() == untrained.keys(), self.first_due
        assert self.running == running, f"{self.running} trajectories are counted as running, {running} are"
        assert self.scoring == scoring, f"{self.scoring} trajectories are counted as scoring, {scoring} are"
        assert {deadline: sorted(heap) for deadline, heap in self._ready.items()} == {
            deadline: sorted(ids) for deadline, ids in ready.items()
        }, f"heaps of ready groups: {self._ready}, not {ready}"

    def _check_group(self, group: GroupState) -> tuple[int, int]:
        """Returns the number of trajectories that have not ended, and how many of those are SCORING."""
        open_ = scoring = survivors = 0
        for trajectory in group.trajectories:
            stage = trajectory.stage
            on_slot = stage is Stage.RUNNING or stage is Stage.MOVING
            assert (trajectory.slot is not None) == on_slot, f"{trajectory}: only running ones are on a slot"
            assert (trajectory.target is not None) == (stage is Stage.MOVING), f"{trajectory}: only moving ones move"
            assert (trajectory.reward is not None) == (stage is Stage.DONE), (
                f"{trajectory}: only ended ones have a reward"
            )
            if stage is Stage.DONE:
                survivors += 1
            elif stage is not Stage.FAILED:
                open_ += 1
                scoring += stage is Stage.SCORING
        assert (group.open, group.survivors) == (open_, survivors), f"{group} has {open_} open, {survivors} survivors"
        assert (group.stage is GroupStage.OPEN) == bool(open_), f"{group} has {open_} open trajectories"
        assert open_ or survivors >= self._min_survivors, f"{group} has too few survivors and has not failed"
        no_signal = not open_ and group.replaceable and group.common_reward is not None
        assert not no_signal, f"{group} has no signal and was not replaced"
        assert (group.step is not None) == (group.stage is GroupStage.TAKEN), group
        return open_, scoring
