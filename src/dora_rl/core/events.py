"""Events: the reports of the runtime to the orchestrator.

Reports may arrive late, twice or out of order, but their content is true.

Reports about a trajectory carry its `attempt`, which grows whenever the trajectory is restarted elsewhere, so that a
report of an earlier attempt is recognised and ignored. Reports of the trainer carry the attempt of the command that
they answer, for the same reason. Reports of an instance include its current load where it is known, which saves a
separate message.
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
    """The data source has delivered prompts, in the order in which they are to be admitted."""

    prompts: tuple[Prompt, ...]
    last: bool = False
    """No more will come."""


class InstanceJoined(Event, frozen=True, kw_only=True):
    """A rollout engine is ready to load weights."""

    spec: InstanceSpec


class InstanceLost(Event, frozen=True, kw_only=True):
    """A rollout engine is gone, with everything that it had in memory."""

    instance: InstanceId
    reason: str = ""


class SlotLoaded(Event, frozen=True, kw_only=True):
    """A slot serves this version now. The fingerprint proves what it loaded, the probe result what it computes."""

    slot: SlotId
    version: Version
    fingerprint: Fingerprint
    probe: ProbeResult | None = None
    """None if the version was published without a probe."""


class SlotLoadFailed(Event, frozen=True, kw_only=True):
    """A load failed; the slot serves nothing."""

    slot: SlotId
    version: Version
    reason: str = ""
    differs: bool = False
    """The weights arrived, but the slot computes other log-probs with them than the trainer published."""


class Progress(Event, frozen=True, kw_only=True):
    """A periodic report of an instance: its load and the progress of its requests."""

    instance: InstanceId
    kv_tokens: int
    tokens: dict[TrajectoryId, int] = {}
    """Response tokens so far, by trajectory."""


class KvPressure(Event, frozen=True, kw_only=True):
    """An instance had to swap requests to host memory, or is about to."""

    instance: InstanceId
    kv_tokens: int


class Generated(Event, frozen=True, kw_only=True):
    """The last token of a trajectory has been sampled."""

    trajectory: TrajectoryId
    attempt: Attempt
    instance: InstanceId
    version: Version
    """The version that generated it, as reported by the engine."""
    fingerprint: Fingerprint
    tokens: int
    """Response tokens."""
    kv_tokens: int
    """KV tokens on the instance after the request has left."""


class Parked(Event, frozen=True, kw_only=True):
    """A trajectory waits for its environment and does not decode."""

    trajectory: TrajectoryId
    attempt: Attempt
    kv_tokens: int | None
    """KV tokens on its instance; None if not known."""


class Unparked(Event, frozen=True, kw_only=True):
    """A parked trajectory decodes again."""

    trajectory: TrajectoryId
    attempt: Attempt
    kv_tokens: int | None
    """KV tokens on its instance; None if not known."""


class Scored(Event, frozen=True, kw_only=True):
    """The reward of a generated trajectory has been computed."""

    trajectory: TrajectoryId
    reward: float
    components: dict[str, float] = {}
    """The value of each reward function, and other numbers that it returned. No decision depends on them."""
    notes: dict[str, bool | int | float | str | None] = {}
    """Other values that the reward functions logged. No decision depends on them."""


class TrajectoryFailed(Event, frozen=True, kw_only=True):
    """A trajectory can't be finished or scored: its environment or reward raised, hung or returned invalid data."""

    trajectory: TrajectoryId
    reason: str


class Moved(Event, frozen=True, kw_only=True):
    """These requests now run on the target of their move, with their KV where the engine can move it."""

    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    source: SlotId
    target: SlotId


class MoveFailed(Event, frozen=True, kw_only=True):
    """These requests did not arrive at the target of their move."""

    trajectories: tuple[TrajectoryId, ...]
    attempts: tuple[Attempt, ...]
    source: SlotId
    target: SlotId
    kept: bool
    """True: the source still runs them. False: their KV is lost, and they continue from their tokens."""


class Accumulated(Event, frozen=True, kw_only=True):
    """The trainer has added the gradients of some groups to those of the step."""

    step: StepId
    attempt: Attempt
    groups: int
    """How many groups."""


class Trained(Event, frozen=True, kw_only=True):
    """The optimiser step is done."""

    step: StepId
    attempt: Attempt


class Published(Event, frozen=True, kw_only=True):
    """The weights of a version can be loaded."""

    version: Version
    attempt: Attempt
    fingerprint: Fingerprint
    probe: str = ""
    """Digest of the probe published with it; empty if there is none."""


class Checkpointed(Event, frozen=True, kw_only=True):
    """The trainer can restart from this version, so earlier batches need not be kept."""

    version: Version


class TrainerLost(Event, frozen=True, kw_only=True):
    """The trainer is gone, with the gradients that it had accumulated."""

    reason: str = ""


class TrainerReady(Event, frozen=True, kw_only=True):
    """A trainer has started and has the weights of this version."""

    version: Version


class BoundChanged(Event, frozen=True, kw_only=True):
    """New groups are admitted under another bound K; groups admitted before keep theirs (mode `dora` only)."""

    max_staleness: int


class StepsChanged(Event, frozen=True, kw_only=True):
    """The run is asked for more steps than before; one that had finished goes on."""

    steps: int


class Tick(Event, frozen=True, kw_only=True):
    """Time has passed, and a timer that the orchestrator set may be due."""


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
    | StepsChanged
    | Tick
)
