"""What the world tells the orchestrator. Reports may come late, twice or out of order; none may be forged.

Reports about a trajectory carry its `attempt`: it grows whenever the trajectory is started anew elsewhere, so that
a report of a former attempt is recognised and ignored. Reports of the trainer carry the attempt that they were asked
with, for the same reason. Reports of an instance carry its current load where it is
known, which saves a message of its own.
"""

from __future__ import annotations

import msgspec

from dora_rl.core.probe import ProbeResult
from dora_rl.core.types import (
    Attempt,
    Fingerprint,
    InstanceId,
    InstanceSpec,
    Prompt,
    SlotId,
    StepId,
    TrajectoryId,
    Version,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base of all events."""


class PromptsArrived(Event, frozen=True, kw_only=True):
    """Prompts from the data source, in the order in which they shall be admitted."""

    prompts: tuple[Prompt, ...]
    last: bool = False
    """No more will come."""


class InstanceJoined(Event, frozen=True, kw_only=True):
    """A rollout engine is ready to load weights."""

    spec: InstanceSpec


class InstanceLost(Event, frozen=True, kw_only=True):
    """A rollout engine is gone, with all that it held in memory."""

    instance: InstanceId
    reason: str = ""


class SlotLoaded(Event, frozen=True, kw_only=True):
    """A slot serves this version from now on: the fingerprint proves what was loaded, the probe what is computed."""

    slot: SlotId
    version: Version
    fingerprint: Fingerprint
    probe: ProbeResult | None = None
    """None: the version was published without a probe."""


class SlotLoadFailed(Event, frozen=True, kw_only=True):
    """Loading failed; the slot serves nothing."""

    slot: SlotId
    version: Version
    reason: str = ""
    differs: bool = False
    """The weights came, but what the slot computed with them is not what the trainer published."""


class Progress(Event, frozen=True, kw_only=True):
    """Heartbeat of an instance: its load and how far its requests are."""

    instance: InstanceId
    kv_tokens: int
    tokens: dict[TrajectoryId, int] = {}
    """Response tokens so far, by trajectory."""


class KvPressure(Event, frozen=True, kw_only=True):
    """An instance had to swap requests to host memory, or is about to."""

    instance: InstanceId
    kv_tokens: int


class Generated(Event, frozen=True, kw_only=True):
    """The last token of a trajectory is sampled."""

    trajectory: TrajectoryId
    attempt: Attempt
    instance: InstanceId
    version: Version
    """The version that served it, as the engine saw it."""
    fingerprint: Fingerprint
    tokens: int
    """Response tokens."""
    kv_tokens: int
    """Load of the instance after it left."""


class Parked(Event, frozen=True, kw_only=True):
    """A trajectory waits for its environment and does not decode."""

    trajectory: TrajectoryId
    attempt: Attempt
    kv_tokens: int | None
    """Of its instance; none: not known."""


class Unparked(Event, frozen=True, kw_only=True):
    """A parked trajectory decodes again."""

    trajectory: TrajectoryId
    attempt: Attempt
    kv_tokens: int | None
    """Of its instance; none: not known."""


class Scored(Event, frozen=True, kw_only=True):
    """A generated trajectory has its reward."""

    trajectory: TrajectoryId
    reward: float
    components: dict[str, float] = {}
    """What each reward function gave, and further numbers that it told of; for people, nothing is decided by it."""


class TrajectoryFailed(Event, frozen=True, kw_only=True):
    """A trajectory can't be finished or scored: its environment or reward raised, hung or returned nonsense."""

    trajectory: TrajectoryId
    reason: str


class Moved(Event, frozen=True, kw_only=True):
    """These requests run on the target of their move now; with their KV, where the engine can move it."""

    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    source: SlotId
    target: SlotId


class MoveFailed(Event, frozen=True, kw_only=True):
    """These requests did not arrive."""

    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    source: SlotId
    target: SlotId
    kept: bool
    """The source still runs them; otherwise their KV is lost and they go on from their tokens."""


class Accumulated(Event, frozen=True, kw_only=True):
    """The trainer has added the gradients of so many groups to the step."""

    step: StepId
    attempt: Attempt
    groups: int


class Trained(Event, frozen=True, kw_only=True):
    """The optimiser step is done."""

    step: StepId
    attempt: Attempt


class Published(Event, frozen=True, kw_only=True):
    """A version can be loaded."""

    version: Version
    attempt: Attempt
    fingerprint: Fingerprint
    probe: str = ""
    """Digest of the probe published with it; empty: there is none."""


class Checkpointed(Event, frozen=True, kw_only=True):
    """The trainer can restart from this version; earlier batches need not be kept."""

    version: Version


class TrainerLost(Event, frozen=True, kw_only=True):
    """The trainer is gone; what it had accumulated is lost."""

    reason: str = ""


class TrainerReady(Event, frozen=True, kw_only=True):
    """A trainer is there, with the weights of this version."""

    version: Version


class BoundChanged(Event, frozen=True, kw_only=True):
    """From now on groups are admitted under another bound K; those admitted before keep theirs. Mode `dora` only."""

    max_staleness: int


class Tick(Event, frozen=True, kw_only=True):
    """Time has passed: a deadline that the orchestrator asked to be woken for may be due."""


AnyEvent = (
    PromptsArrived
    | InstanceJoined
    | InstanceLost
    | SlotLoaded
    | SlotLoadFailed
    | Progress
    | KvPressure
    | Generated
    | Parked
    | Unparked
    | Scored
    | TrajectoryFailed
    | Moved
    | MoveFailed
    | Accumulated
    | Trained
    | Published
    | Checkpointed
    | TrainerLost
    | TrainerReady
    | BoundChanged
    | Tick
)
