"""Commands: the instructions of the orchestrator to the runtime. Commands to one instance are executed in order."""

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
    """Ask the data source for more prompts."""

    count: int


class LoadVersion(Command, frozen=True, kw_only=True):
    """Load a version into a slot."""

    slot: SlotId
    version: Version
    in_flight: bool = False
    """Running requests continue under the new weights (mode `partial` only)."""


class UnloadSlot(Command, frozen=True, kw_only=True):
    """Free the weights of a slot; it serves no version from now on."""

    slot: SlotId


class StartGroup(Command, frozen=True, kw_only=True):
    """Generate a group. Its trajectories are `group * group_size + 0 .. group_size - 1`, all at attempt 0."""

    group: GroupId
    prompt: Prompt
    version: Version
    slot: SlotId


class Resume(Command, frozen=True, kw_only=True):
    """Continue a trajectory from its tokens so far, by prefilling them again."""

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
    """Drop this attempt, if the instance still has it."""

    trajectory: TrajectoryId
    attempt: Attempt
    instance: InstanceId


class Score(Command, frozen=True, kw_only=True):
    """Compute the reward of a generated trajectory."""

    trajectory: TrajectoryId


class Accumulate(Command, frozen=True, kw_only=True):
    """Add the gradients of these groups to those of the step."""

    step: StepId
    attempt: Attempt
    groups: tuple[GroupId, ...]


class Apply(Command, frozen=True, kw_only=True):
    """Close the step with the optimiser's update; all its groups are accumulated, or sent to be."""

    step: StepId
    attempt: Attempt
    groups: tuple[GroupId, ...]
    """The whole batch, by version and order of admission."""


class Publish(Command, frozen=True, kw_only=True):
    """Make the trainer's weights loadable as this version."""

    version: Version
    attempt: Attempt


class Retire(Command, frozen=True, kw_only=True):
    """Free the weights of a version that nothing uses any more."""

    version: Version


class FailTrajectory(Command, frozen=True, kw_only=True):
    """A trajectory fails: it won't be finished, and its siblings continue without it."""

    trajectory: TrajectoryId
    reason: str


class GroupFailed(Command, frozen=True, kw_only=True):
    """A group fails: too few of its trajectories are left, so it won't be trained."""

    group: GroupId
    reasons: tuple[str, ...]


class GroupWithoutSignal(Command, frozen=True, kw_only=True):
    """A group ends without signal: its rewards are all equal, so it won't be trained and another prompt replaces it."""

    group: GroupId
    reward: float
    """The reward of all its trajectories that were finished."""


class EvictInstance(Command, frozen=True, kw_only=True):
    """Stop an instance that did not answer in time and counts as lost; restart it if possible."""

    instance: InstanceId
    reason: str


class RestartTrainer(Command, frozen=True, kw_only=True):
    """Stop a trainer that did not answer in time, and start another one."""

    reason: str


class SlotIdles(Command, frozen=True, kw_only=True):
    """A slot has nothing to do, for this cause, until something is started on it."""

    slot: SlotId
    cause: IdleCause


class TrainerIdles(Command, frozen=True, kw_only=True):
    """The trainer has nothing to do, for this cause."""

    cause: IdleCause


class Stalled(Command, frozen=True, kw_only=True):
    """The run has made no progress for too long."""

    waits: tuple[str, ...]
    """One sentence for each thing that is waited for: what waits, and for what."""


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
    | GroupWithoutSignal
    | EvictInstance
    | RestartTrainer
    | SlotIdles
    | TrainerIdles
    | Stalled
)
