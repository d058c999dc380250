"""The effective sample size of an update: how many of its trajectories the importance weights leave.

The weight w of a trajectory is the product of its token ratios, the probability of its trained tokens under the policy
that the update starts from, divided by that under the behaviour policy. Of n trajectories,

    ESS / n = (sum w)^2 / (n * sum w^2)

is 1 if all weights are equal, and 1 / n if one of them dominates (Kish; as in VCPO, arXiv 2602.17616).

Only n, sum w and sum w^2 are kept, so the value does not depend on how trajectories are divided over calls,
micro-batches and ranks. The sums are float64, and log w is limited to +-300: squares of weights then neither overflow
nor vanish. Weights beyond that limit count as if they were at it; any such weight dominates, or is negligible, anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

KEYS = ("weighed", "weights", "squared_weights")
"""The names of n, sum w and sum w^2."""
_LIMIT = 300.0


def weight_sums(log_weights: Tensor) -> dict[str, Tensor]:
    """n, sum w and sum w^2 of trajectories, from [S] log-weights in float64."""
    weights = log_weights.clamp(-_LIMIT, _LIMIT).exp()
    values = (weights.new_tensor(float(len(weights))), weights.sum(), weights.square().sum())
    return dict(zip(KEYS, values, strict=True))


def relative_size(sums: Mapping[str, float]) -> float | None:
    """ESS / n, in (0, 1]; None if no trajectory was computed."""
    count, total, squares = (sums.get(key, 0.0) for key in KEYS)
    return min(1.0, total / squares * total / count) if count else None
