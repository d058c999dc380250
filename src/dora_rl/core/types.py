"""The glossary as types. The words here are the words everywhere: code, config, metrics, docs, messages.

Identities are small integers handed out in order of admission, so that a run is repeatable and every table sorts
the way it happened:

- a `GroupId` counts admitted groups: 0, 1, 2 ...
- a `TrajectoryId` is `group * group_size + sibling`. It also keys the sampler, so what a trajectory says does not
  depend on where or in which batch it ran.
- a `Version` n is the policy after n optimiser steps; step n starts from version n and publishes version n + 1.
- an `InstanceId` names one life of one rollout engine. An engine that restarts joins under a fresh name, so that a
  late report of its former life can't be taken for a report of the new one.
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
    """Seconds as the integer unit of all clocks here: sums of integers are exact, sums of floats are not."""
    return round(seconds * SECOND)


class SlotId(NamedTuple):
    """One place for one set of weights on an instance."""

    instance: InstanceId
    number: int

    def __str__(self) -> str:
        return f"{self.instance}/{self.number}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of plain immutable data."""


class Prompt(Record, frozen=True, kw_only=True):
    """One problem, with a stable key."""

    key: str
    tokens: int = 0
    """Length of the prompt, in tokens."""


class DecodeCost(Record, frozen=True, kw_only=True):
    """What one decode step of an instance takes: `base + per_request * requests + per_token * context tokens`."""

    base: float = 0.0
    """Seconds that a step costs however small its batch: reading the weights, launching kernels."""
    per_request: float = 0.0
    """Seconds per sequence in the batch."""
    per_token: float = 0.0
    """Seconds per token of context held by the batch: reading the KV cache."""

    def seconds(self, requests: float, context: float) -> float:
        return self.base + self.per_request * requests + self.per_token * context


class InstanceSpec(Record, frozen=True, kw_only=True):
    """What an instance can do, said once when it joins. Room is shared by its slots."""

    instance: InstanceId
    slots: int = 1
    """How many versions it can serve at once."""
    max_requests: int
    """How many sequences may decode at once, over all slots."""
    kv_tokens: int
    """How many tokens of KV cache fit, over all slots."""
    one_batch: bool = False
    """Its slots decode in one batch: serving one version more costs nothing but its slot."""
    shares_trainer: bool = False
    """Its devices also train: it pauses, requests kept, while a step is computed."""
    decode: DecodeCost = DecodeCost()
    """Measured or modelled speed; all zero means unknown, and then nothing is planned from it."""
