"""Where time goes. Each slot-second and trainer-second has exactly one label; each idle second names its cause."""

from __future__ import annotations

from enum import StrEnum

from dora_rl.core.types import Record, Version


class ActivityLabel(StrEnum):
    """What a slot or the trainer is doing."""

    DECODE = "decode"
    PREFILL = "prefill"
    REPREFILL = "re-prefill"
    """Computing again KV that existed once: after a weight update in flight, or a lost bundle or instance."""
    LOAD = "load"
    MIGRATE = "migrate"
    TRAIN = "train"
    PUBLISH = "publish"
    IDLE = "idle"


class IdleReason(StrEnum):
    """Why a slot or the trainer idles."""

    STARTING = "starting"
    """Nothing has been published or loaded yet."""
    NO_PROMPTS = "no prompts"
    """The data source has given all it has, or is slow."""
    TRAINER = "trainer"
    """The staleness bound is reached and the trainer is computing: a slot waits for its next version."""
    AHEAD = "ahead of the trainer"
    """The staleness bound would allow another group, but begun now it would only wait for the trainer."""
    STRAGGLERS = "stragglers"
    """The staleness bound or a barrier is reached and the trainer itself waits for unfinished groups."""
    PUBLISH = "publish"
    """A step is trained and its weights are on their way."""
    ROLLOUT = "rollout"
    """Trainer: fewer than a step's groups have finished."""
    DEADLINE = "deadline"
    """Trainer: enough groups have finished, but the room left in the step belongs to older ones still running."""
    REWARD = "reward"
    """Trainer: what it waits for is generated and is being scored."""
    TOOL = "tool"
    """All requests of the instance wait for their environments."""
    SPARE = "spare slot"
    """The instance works in its other slots. They share what it computes with, so nothing idles but a place."""
    RESERVED = "reserved"
    """The slot is being emptied for a version that has requests and no slot."""
    FINISHED = "finished"
    """The run has nothing left to do."""

    @property
    def tag(self) -> str:
        """Its name in metrics, which have no spaces."""
        return self.value.replace(" ", "_")


class IdleCause(Record, frozen=True, kw_only=True):
    """A named cause, with the version that is waited for where there is one."""

    reason: IdleReason
    version: Version | None = None

    def __str__(self) -> str:
        return self.reason.value if self.version is None else f"{self.reason.value} v{self.version}"


WORK = (ActivityLabel.DECODE, ActivityLabel.PREFILL, ActivityLabel.REPREFILL, ActivityLabel.MIGRATE)
"""What occupies a slot."""
ASIDE = (IdleReason.STARTING, IdleReason.SPARE, IdleReason.FINISHED)
"""Idle time in which a slot could not have worked, so it does not count against its occupancy."""
