"""What the orchestrator tells the world. Commands to one instance are carried out in order."""

from __future__ import annotations

import msgspec

from dora_rl.core.activities import IdleCause
from dora_rl.core.types import (
    Attempt,
    GroupId,
    InstanceId,
    Prompt,
    SlotId,
    StepId,
    TrajectoryId,
    Version,
)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="command", tag=True):
    """Base of all commands."""


class FetchPrompts(Command, frozen=True, kw_only=True):
    """Ask the data source for more."""

    count: int


class LoadVersion(Command, frozen=True, kw_only=True):
    """Load a version into a slot."""

    slot: SlotId
    version: Version
    in_flight: bool = False
    """Running requests stay and go on under the new weights (mode `partial` only)."""


class UnloadSlot(Command, frozen=True, kw_only=True):
    """The slot serves nothing from now on: let go of its weights."""

    slot: SlotId


class StartGroup(Command, frozen=True, kw_only=True):
    """Generate a group: the siblings are `group * group_size + 0 .. group_size - 1`, all at attempt 0."""

    group: GroupId
    prompt: Prompt
    version: Version
    slot: SlotId


class Resume(Command, frozen=True, kw_only=True):
    """Go on with a trajectory from its tokens so far, by prefilling them again."""

    trajectory: TrajectoryId
    attempt: Attempt
    prompt: Prompt
    version: Version
    slot: SlotId


class Move(Command, frozen=True, kw_only=True):
    """Move running requests with their KV between two slots of one version."""

    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    version: Version
    source: SlotId
    target: SlotId


class Abort(Command, frozen=True, kw_only=True):
    """Forget this attempt, should it be there."""

    trajectory: TrajectoryId
    attempt: Attempt
    instance: InstanceId


class Score(Command, frozen=True, kw_only=True):
    """Compute the reward of a generated trajectory."""

    trajectory: TrajectoryId


class Accumulate(Command, frozen=True, kw_only=True):
    """Add the gradients of these groups to the step."""

    step: StepId
    attempt: Attempt
    groups: tuple[GroupId, ...]


class Apply(Command, frozen=True, kw_only=True):
    """All groups of the step are accumulated or on their way: close it with the optimiser's update."""

    step: StepId
    attempt: Attempt
    groups: tuple[GroupId, ...]
    """The whole batch, by version and order of admission."""


class Publish(Command, frozen=True, kw_only=True):
    """Make the trainer's weights loadable as this version."""

    version: Version
    attempt: Attempt


class Retire(Command, frozen=True, kw_only=True):
    """Nothing holds this version any more: free its weights."""

    version: Version


class FailTrajectory(Command, frozen=True, kw_only=True):
    """Verdict: this trajectory won't be finished; its siblings go on without it."""

    trajectory: TrajectoryId
    reason: str


class GroupFailed(Command, frozen=True, kw_only=True):
    """Verdict: too few siblings survived; the group won't be trained."""

    group: GroupId
    reasons: tuple[str, ...]


class EvictInstance(Command, frozen=True, kw_only=True):
    """This instance did not answer in time and counts as lost: stop it, restart it if you can."""

    instance: InstanceId
    reason: str


class RestartTrainer(Command, frozen=True, kw_only=True):
    """The trainer did not answer in time: stop it and start another."""

    reason: str


class SlotIdles(Command, frozen=True, kw_only=True):
    """The slot has nothing to do, and why; it holds until something is started there."""

    slot: SlotId
    cause: IdleCause


class TrainerIdles(Command, frozen=True, kw_only=True):
    """The trainer has nothing to do, and why."""

    cause: IdleCause


class Stalled(Command, frozen=True, kw_only=True):
    """Nothing has moved for too long: who waits for what."""

    waits: tuple[str, ...]


AnyCommand = (
    FetchPrompts
    | LoadVersion
    | UnloadSlot
    | StartGroup
    | Resume
    | Move
    | Abort
    | Score
    | Accumulate
    | Apply
    | Publish
    | Retire
    | FailTrajectory
    | GroupFailed
    | EvictInstance
    | RestartTrainer
    | SlotIdles
    | TrainerIdles
    | Stalled
)
