"""The types that an algorithm is composed of.

An algorithm defines how rewards become advantages, how ratios and advantages become a loss per token, how token losses
are averaged, and its default clipping bounds. Everything else (KL, entropy, corrections, packing, updates) is the same
for all algorithms.

The configuration imports the algorithms, so neither torch nor numpy is imported before an algorithm computes something:
a mistake in a config file is reported at once.

Dimensions: a micro-batch has N trained tokens, flattened, of S trajectories; a step has B groups of G siblings each.
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
"""One array [G] per group."""

AdvantageFunction: TypeAlias = "Callable[[Rewards], list[NDArray[np.float64]]]"
"""Maps the rewards of groups to advantages of the same shape."""

Scope: TypeAlias = Literal["group", "step"]
"""What an advantage depends on: its own group, so that a step can stream, or all groups of the step."""

Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "constant_length"]

Correction: TypeAlias = Literal[
    "none", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "geometric_mask"
]

TrustRegion: TypeAlias = Literal["clip", "binary_tv", "binary_kl", "second_moment"]
"""What keeps an update close to the policy that the ratio refers to: the clip of the ratio, or a mask on tokens."""


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
    """[N] log-prob under the policy minus log-prob under the policy that the ratio refers to, with gradient."""
    logprobs: Tensor
    """[N] log-probs under the policy, with gradient."""
    advantages: Tensor
    """[N] the advantage of each token's trajectory."""
    sequence: Tensor
    """[N] index of each token's trajectory, 0..S-1."""
    lengths: Tensor
    """[S] trained tokens of each trajectory."""


class TokenLoss(NamedTuple):
    """The result of a policy loss."""

    loss: Tensor
    """[N] with gradient."""
    ratio: Tensor
    """[N] the ratio before clipping, without gradient."""
    clipped: Tensor
    """[N] true where clipping cut the gradient or changed the weight."""


PolicyLoss: TypeAlias = Callable[[TokenBatch, Clip], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A named composition of functions and defaults."""

    name: str
    """The value of `trainer.algorithm.name` that selects it."""
    advantage: AdvantageFunction
    scope: Scope = "group"
    policy_loss: PolicyLoss
    aggregation: Aggregation
    """The default of `trainer.algorithm.aggregation`."""
    clip: Clip
    """The defaults of the clipping bounds."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether a group whose rewards are all equal has advantages, next to a group whose rewards differ."""
        import numpy as np

        return bool(self.advantage([np.array([1.0, 1.0]), np.array([0.0, 1.0])])[0].any())
