"""What became of every prompt: the life of groups and trajectories, and the counts that the rules need.

    trajectory  QUEUED <-> RUNNING <-> MOVING -> SCORING -> DONE
                any of them ------------------------------> FAILED
    group       OPEN -> READY -> TAKEN -> TRAINED
                OPEN -> FAILED

Invariants:
- a trajectory belongs to one group and a group to one version and one deadline, for ever;
- a group is READY when all its trajectories have ended and enough survived, FAILED when too few did;
- a group is TAKEN by one step only, and TRAINED when that step's weights are published;
- `untrained[v]` counts the groups of version v that are OPEN, READY or TAKEN; `unfinished[v]` those that are OPEN;
  `due[d]` counts the untrained ones by deadline.
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
    """Where a trajectory is in its life."""

    QUEUED = auto()
    """Has no slot: its instance was lost."""
    RUNNING = auto()
    MOVING = auto()
    SCORING = auto()
    DONE = auto()
    FAILED = auto()


class GroupStage(Enum):
    """Where a group is in its life."""

    OPEN = auto()
    READY = auto()
    TAKEN = auto()


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One trajectory in flight."""

    id: TrajectoryId
    group: GroupState = field(repr=False)
    slot: SlotState | None = field(default=None, repr=False)
    """Where it runs; the source while it moves."""
    target: SlotState | None = field(default=None, repr=False)
    """Where it moves to."""
    stage: Stage = Stage.RUNNING
    attempt: Attempt = 0
    tokens: int = 0
    """Response tokens when last heard of."""
    parked: bool = False
    """Waits for its environment and does not decode."""
    parks: int = 0
    """How often it was parked: names one wait."""

    @property
    def context(self) -> int:
        """Tokens of KV that it holds."""
        return self.group.prompt.tokens + self.tokens


@dataclass(slots=True, eq=False)
class GroupState:
    """One admitted group."""

    id: GroupId
    prompt: Prompt
    version: Version
    deadline: StepId
    """The last step that may train it: its version + the bound under which it was admitted."""
    trajectories: list[TrajectoryState] = field(default_factory=list, repr=False)
    stage: GroupStage = GroupStage.OPEN
    open: int = 0
    """Trajectories that have not ended."""
    survivors: int = 0
    reasons: list[str] = field(default_factory=list)
    step: StepId | None = None
    admitted_at: Nanoseconds = 0


class GroupTable:
    """All groups that are admitted and not yet trained."""

    def __init__(self, group_size: int, min_survivors: int) -> None:
        self._group_size = group_size
        self._min_survivors = min_survivors
        self.groups: dict[GroupId, GroupState] = {}
        self.admitted = 0
        self.trained = 0
        self.failed = 0
        self.failed_trajectories: Counter[str] = Counter()
        self.untrained: dict[Version, int] = {}
        self.unfinished: dict[Version, int] = {}
        self.due: dict[StepId, int] = {}
        self.first_due: dict[Version, StepId] = {}
        """The earliest deadline that groups of an untrained version were admitted with."""
        self.running = 0
        """Trajectories QUEUED, RUNNING or MOVING."""
        self.scoring = 0
        self.stock = 0
        """Groups READY."""
        self._ready: dict[StepId, list[GroupId]] = {}
        """READY groups by deadline."""

    @property
    def live(self) -> int:
        """Groups admitted and neither trained nor failed."""
        return self.admitted - self.trained - self.failed

    @property
    def open_groups(self) -> int:
        return sum(self.unfinished.values())

    def admit(
        self, prompt: Prompt, version: Version, deadline: StepId, slot: SlotState, now: Nanoseconds
    ) -> GroupState:
        """Admit a prompt under a version: from here on it will be trained or get a verdict."""
        group = GroupState(
            id=self.admitted, prompt=prompt, version=version, deadline=deadline, open=self._group_size, admitted_at=now
        )
        first = group.id * self._group_size
        group.trajectories = [
            TrajectoryState(id=first + sibling, group=group, slot=slot) for sibling in range(self._group_size)
        ]
        self.groups[group.id] = group
        self.admitted += 1
        self.running += self._group_size
        self.untrained[version] = self.untrained.get(version, 0) + 1
        self.unfinished[version] = self.unfinished.get(version, 0) + 1
        self.due[deadline] = self.due.get(deadline, 0) + 1
        self.first_due[version] = min(deadline, self.first_due.get(version, deadline))
        return group

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryState | None:
        """A trajectory of an untrained group; None if its group is settled or was never admitted."""
        group = self.groups.get(trajectory // self._group_size)
        return None if group is None else group.trajectories[trajectory % self._group_size]

    def generated(self, trajectory: TrajectoryState, tokens: int) -> None:
        """The last token is sampled; the reward is due."""
        assert trajectory.stage in (Stage.QUEUED, Stage.RUNNING, Stage.MOVING)
        trajectory.stage = Stage.SCORING
        trajectory.tokens = tokens
        self.running -= 1
        self.scoring += 1

    def scored(self, trajectory: TrajectoryState) -> GroupState | None:
        """The reward is there; returns the group if that ended it."""
        assert trajectory.stage is Stage.SCORING
        trajectory.stage = Stage.DONE
        trajectory.group.survivors += 1
        self.scoring -= 1
        return self._ended(trajectory.group)

    def fail(self, trajectory: TrajectoryState, reason: str) -> GroupState | None:
        """A verdict: this trajectory won't finish; returns the group if that ended it."""
        assert trajectory.stage not in (Stage.DONE, Stage.FAILED)
        if trajectory.stage is Stage.SCORING:
            self.scoring -= 1
        else:
            self.running -= 1
        trajectory.stage = Stage.FAILED
        trajectory.group.reasons.append(reason)
        self.failed_trajectories[reason] += 1
        return self._ended(trajectory.group)

    def _ended(self, group: GroupState) -> GroupState | None:
        group.open -= 1
        if group.open:
            return None
        self._decrement(self.unfinished, group.version)
        if group.survivors >= self._min_survivors:
            group.stage = GroupStage.READY
            self.stock += 1
            heapq.heappush(self._ready.setdefault(group.deadline, []), group.id)
        else:
            self.failed += 1
            self._forget(group)
        return group

    def ready_deadlines(self) -> list[StepId]:
        """Deadlines of READY groups, earliest first."""
        return sorted(self._ready)

    def oldest_due(self, deadline: StepId) -> Version:
        """The oldest version that is unfinished and has groups due by this step."""
        due = (version for version in self.unfinished if self.first_due[version] <= deadline)
        return min(due, default=min(self.untrained))

    def take(self, deadline: StepId, step: StepId) -> GroupState:
        """The READY group with this deadline that was admitted first becomes part of the step."""
        group = self.groups[heapq.heappop(self._ready[deadline])]
        if not self._ready[deadline]:
            del self._ready[deadline]
        assert group.stage is GroupStage.READY
        assert group.version <= step <= group.deadline, f"group {group.id} in step {step} breaks its bound"
        group.stage = GroupStage.TAKEN
        self.stock -= 1
        group.step = step
        return group

    def settle(self, group: GroupState) -> None:
        """The step that took the group is published: it is trained."""
        assert group.stage is GroupStage.TAKEN
        self.trained += 1
        self._forget(group)

    def _forget(self, group: GroupState) -> None:
        self._decrement(self.untrained, group.version)
        self._decrement(self.due, group.deadline)
        if group.version not in self.untrained:
            del self.first_due[group.version]
        del self.groups[group.id]

    @staticmethod
    def _decrement(counts: dict[int, int], key: int) -> None:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
