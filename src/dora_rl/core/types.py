"""Identifiers and small records of the whole system; the glossary is in `dora_rl.core`.

Identifiers are small integers in order of admission, so that a run is repeatable and tables sort chronologically:

- a `GroupId` counts admitted groups: 0, 1, 2 ...
- a `TrajectoryId` is `group * group_size + sibling`. It also keys the sampler, so the tokens of a trajectory do not
  depend on where or in which batch it ran.
- a `Version` n is the policy after n optimiser steps; step n starts from version n and publishes version n + 1.
- an `InstanceId` names one rollout engine and is unique per restart, so that a late report of an engine before its
  restart can't be mistaken for a report after it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

Version: TypeAlias = int
StepId: TypeAlias = int
GroupId: TypeAlias = int
TrajectoryId: TypeAlias = int
Attempt: TypeAlias = int
InstanceId: TypeAlias = str
Fingerprint: TypeAlias = str
Nanoseconds: TypeAlias = int

SECOND: Nanoseconds = 1_000_000_000


def nanoseconds(seconds: float) -> Nanoseconds:
    """Convert seconds to the integer unit of all clocks: sums of integers are exact, sums of floats are not."""
    return round(seconds * SECOND)


class SlotId(NamedTuple):
    """Identifies a slot: room for one set of weights on an instance."""

    instance: InstanceId
    number: int

    def __str__(self) -> str:
        return f"{self.instance}/{self.number}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of immutable data records."""


class Prompt(Record, frozen=True, kw_only=True):
    """One problem, with a stable key."""

    key: str
    tokens: int = 0
    """Length of the prompt, in tokens."""


class DecodeCost(Record, frozen=True, kw_only=True):
    """The time of one decode step: `base + per_request * requests + per_token * context tokens`, in seconds."""

    base: float = 0.0
    """Seconds per step, whatever the batch size: reading the weights, launching kernels."""
    per_request: float = 0.0
    """Seconds per sequence in the batch."""
    per_token: float = 0.0
    """Seconds per context token of the batch: reading the KV cache."""

    def seconds(self, requests: float, context: float) -> float:
        return self.base + self.per_request * requests + self.per_token * context


class InstanceSpec(Record, frozen=True, kw_only=True):
    """The capacity of an instance, declared when it joins. Its slots share the limits."""

    instance: InstanceId
    slots: int = 1
    """How many versions the instance can serve at once."""
    max_requests: int
    """How many sequences may decode at once, over all slots."""
    kv_tokens: int
    """Size of the KV cache in tokens, over all slots."""
    one_batch: bool = False
    """All slots decode in one batch, so serving another version costs nothing but a slot."""
    shares_trainer: bool = False
    """The instance's devices also train: it pauses, keeping its requests, while a step is computed."""
    decode: DecodeCost = DecodeCost()
    """Measured or modelled speed; all zeros mean unknown, and then no plan uses it."""
