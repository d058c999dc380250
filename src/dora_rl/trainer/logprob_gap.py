"""How far the engine's log-probs are from the trainer's own, token by token.

The difference is the engines' alone only where both hold the same weights: on trajectories of the version that the step
starts from (staleness 0), before the step's first update. There, two figures are taken:

- the mean of |behaviour - trainer| (`mismatch_gap`): what a fault that concerns all tokens moves, and what stays small
  where rounding alone is at work, since roundings have no direction;
- its 99th percentile (`mismatch_gap_p99`): what a fault that concerns few tokens moves (a wrong window, long contexts
  only, one expert), while the mean would still look like rounding.

The percentile comes from counts in bins that grow by a factor, since counts can be summed over micro-batches and
processes. It is the upper edge of its bin, so it is never too low and at most a third too high.

Sampling with top-p, top-k or min-p divides by the mass that it keeps, so behaviour log-probs are higher than the
model's; the trainer does not mirror this. What it explains is left out (`explained_by_sampling`), so that a gap is a
gap between engine and trainer whatever the sampling. The temperature is mirrored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PER_DECADE = 8
_LOWEST, _HIGHEST = -8, 3
_EDGES = torch.logspace(_LOWEST, _HIGHEST, (_HIGHEST - _LOWEST) * _PER_DECADE + 1, dtype=torch.float64)
_SHARE = 0.99


def explained_by_sampling(top_p: float, top_k: int, min_p: float) -> float:
    """By how much truncation can raise a log-prob at most.

    Top-p keeps at least a mass of `top_p`. What top-k and min-p keep has no useful bound, so there only log-probs that
    are lower than the trainer's count: a fault of an engine has both signs.
    """
    if top_k or min_p:
        return math.inf
    return -math.log(top_p)


def unexplained(gap: Tensor, explained: float) -> Tensor:
    """[N] distances of log-probs, without what truncated sampling explains; `gap` is behaviour minus trainer."""
    return torch.maximum(-gap, gap - explained).clamp_min(0.0)


def histogram(apart: Tensor) -> Tensor:
    """How many distances lie in each bin."""
    place = torch.bucketize(apart.double(), _EDGES.to(apart.device))
    return torch.bincount(place, minlength=len(_EDGES) + 1).double()


def tail(counts: Tensor) -> dict[str, float]:
    """The 99th percentile, as a metric; nothing where nothing was measured."""
    whole = float(counts.sum())
    if not whole:
        return {}
    place = int((counts.cumsum(0) < _SHARE * whole).sum())
    return {"mismatch_gap_p99": float(_EDGES[min(place, len(_EDGES) - 1)])}
