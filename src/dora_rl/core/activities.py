"""What slots and the trainer spend time on. Each second has exactly one label, and each idle second one cause."""

from __future__ import annotations

from enum import StrEnum

from dora_rl.core.types import Record, Version


class ActivityLabel(StrEnum):
    """What a slot or the trainer spends its time on."""

    DECODE = "decode"
    PREFILL = "prefill"
    REPREFILL = "re-prefill"
    """Recomputing a KV cache that was lost: after an in-flight weight update, or with a lost bundle or instance."""
    LOAD = "load"
    MIGRATE = "migrate"
    TRAIN = "train"
    PUBLISH = "publish"
    IDLE = "idle"


class IdleReason(StrEnum):
    """Why a slot or the trainer is idle."""

    STARTING = "starting"
    """Nothing has been published or loaded yet."""
    NO_PROMPTS = "no prompts"
    """The data source is exhausted or slow."""
    TRAINER = "trainer"
    """The staleness bound is reached and the trainer is computing; the slot waits for the next version."""
    AHEAD = "ahead of the trainer"
    """The staleness bound allows another group, but a group started now would only wait for the trainer."""
    STRAGGLERS = "stragglers"
    """The staleness bound or a barrier is reached, and the trainer itself waits for unfinished groups."""
    PUBLISH = "publish"
    """A step is trained and its weights are being published."""
    ROLLOUT = "rollout"
    """Trainer: too few groups have finished for a step."""
    DEADLINE = "deadline"
    """Trainer: enough groups have finished, but the rest of the batch is reserved for older groups that still run."""
    REWARD = "reward"
    """Trainer: the groups that it waits for are generated and are being scored."""
    TOOL = "tool"
    """All requests of the instance wait for their environments."""
    SPARE = "spare slot"
    """The instance works in its other slots. Slots share the instance's compute, so no capacity is lost."""
    RESERVED = "reserved"
    """The slot is being emptied for a version that has requests but no slot."""
    FINISHED = "finished"
    """The run has nothing left to do."""

    @property
    def tag(self) -> str:
        """Its name in metrics, where spaces are not allowed."""
        return self.value.replace(" ", "_")


class IdleCause(Record, frozen=True, kw_only=True):
    """Why something is idle, and the version that it waits for, if any."""

    reason: IdleReason
    version: Version | None = None

    def __str__(self) -> str:
        return self.reason.value if self.version is None else f"{self.reason.value} v{self.version}"


WORK = (ActivityLabel.DECODE, ActivityLabel.PREFILL, ActivityLabel.REPREFILL, ActivityLabel.MIGRATE)
"""Activities that count as work of a slot."""
UNAVAILABLE = (IdleReason.STARTING, IdleReason.SPARE, IdleReason.FINISHED)
"""Idle time in which a slot could not have worked; it does not count against the slot's occupancy."""
