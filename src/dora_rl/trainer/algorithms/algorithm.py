"""What an algorithm is made of: pure functions that compose.

An algorithm names how rewards become advantages, how ratios and advantages become a loss per token, how token losses
are averaged, and its usual clipping bounds. Everything else (KL, entropy, corrections, packing, updates) is the same
for all of them.

The algorithms are part of the configuration, so neither torch nor numpy is imported before one of them computes: a
mistake in a config file is reported at once.

Shapes: N trained tokens of S trajectories in one micro-batch, flat; B groups of a step with G siblings each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Rewards: TypeAlias = "Sequence[NDArray[np.float64]]"
"""One array [G] for each group."""

AdvantageFunction: TypeAlias = "Callable[[Rewards], list[NDArray[np.float64]]]"
"""Rewards of groups to advantages of the same shape."""

Scope: TypeAlias = Literal["group", "step"]
"""What an advantage depends on: its own group, so that a step can stream, or all groups of the step."""

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant_length"]

Correction: TypeAlias = Literal["none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask"]


class Clip(NamedTuple):
    """Bounds on the ratio."""

    low: float
    """A ratio below 1 - low is clipped where the advantage is negative."""
    high: float
    """A ratio above 1 + high is clipped where the advantage is positive."""
    negative: float | None = None
    """A ratio above this is clipped where the advantage is negative; None leaves it free."""


class TokenBatch(NamedTuple):
    """The trained tokens of a micro-batch."""

    log_ratio: Tensor
    """[N] log of policy over the policy that the ratio is to, with gradient."""
    logprobs: Tensor
    """[N] log-probs under the policy, with gradient."""
    advantages: Tensor
    """[N] the advantage of each token's trajectory."""
    sequence: Tensor
    """[N] index of each token's trajectory, 0..S-1."""
    lengths: Tensor
    """[S] trained tokens of each trajectory."""


class TokenLoss(NamedTuple):
    """What a policy loss says."""

    loss: Tensor
    """[N] with gradient."""
    ratio: Tensor
    """[N] the ratio that was bounded, without gradient."""
    clipped: Tensor
    """[N] true where a bound cut the gradient or the weight."""


PolicyLoss: TypeAlias = Callable[[TokenBatch, Clip], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A named composition."""

    name: str
    """The value of `trainer.algorithm.name` that selects it."""
    advantage: AdvantageFunction
    scope: Scope = "group"
    policy_loss: PolicyLoss
    aggregation: Aggregation
    clip: Clip
