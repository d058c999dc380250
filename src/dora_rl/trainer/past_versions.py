"""Host copies of the trained weights of past versions, with which a stale trajectory's gap is divided by its causes.

The log-probs of a stale trajectory differ from the policy's for two reasons: the engine computed them, and an older
version sampled them. The trainer's own forward pass with the weights of that version separates the two:

    engine's log-probs --engine_kl--> trainer's forward, behaviour version --staleness_kl--> trainer's forward, now

Invariants:
- a version is held from the step that it starts to the step with the largest staleness that may still train it;
- within `loaded` the policy has the weights of that version, after it exactly those from before.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dora_rl.core.trajectory import Group
from dora_rl.core.types import Version


class PastVersions:
    """The weights of the last `limit` versions, or shards of them, in host memory."""

    def __init__(self, policy: nn.Module, parameters: Sequence[Tensor], limit: int) -> None:
        self._policy = policy
        self._parameters = parameters
        self._limit = limit
        self._copies: dict[Version, list[Tensor]] = {}

    @property
    def versions(self) -> frozenset[Version]:
        """The versions that are held."""
        return frozenset(self._copies)

    def hold(self, version: Version) -> None:
        """Hold the weights that the policy has now as this version, and drop the versions that are too old."""
        if not self._limit:
            return
        self._copies[version] = [_local(parameter).detach().to("cpu", copy=True) for parameter in self._parameters]
        for old in [one for one in self._copies if one <= version - self._limit]:
            del self._copies[old]

    @contextlib.contextmanager
    def loaded(self, version: Version) -> Iterator[None]:
        """Give the policy the weights of a version that is held."""
        current = [_local(parameter).detach().to("cpu", copy=True) for parameter in self._parameters]
        try:
            self._write(self._copies[version])
            yield
        finally:
            self._write(current)

    def _write(self, weights: Sequence[Tensor]) -> None:
        # Outside of a backward pass FSDP may keep gathered weights, which would hide those written here.
        for module in self._policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        with torch.no_grad():
            for parameter, values in zip(self._parameters, weights, strict=True):
                _local(parameter).copy_(values)


def most_frequent(groups: Sequence[Group], versions: frozenset[Version]) -> list[Group]:
    """The groups of the version, out of `versions`, that most of the groups have; of several such the oldest."""
    counts = Counter(group.version for group in groups if group.version in versions)
    if not counts:
        return []
    chosen = min(counts, key=lambda version: (-counts[version], version))
    return [group for group in groups if group.version == chosen]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
