"""The distance between the engine's log-probs and the trainer's own, token by token.

The distance has no other cause than engine and trainer only where both hold the same weights: on trajectories of the
version that the step starts from (staleness 0), before the step's first update. There, two metrics are computed:

- `mismatch_gap`, the mean of |behaviour - trainer|, reveals a fault that affects all tokens. It stays small if rounding
  is the only cause, since rounding errors have no preferred direction;
- `mismatch_gap_p99`, the 99th percentile, reveals a fault that affects few tokens (a wrong attention window, only long
  contexts, one expert), for which the mean would still look like rounding.

The percentile is computed from a histogram with logarithmic bins, since histograms can be summed over micro-batches and
ranks. It is the upper edge of its bin, so it is never too low and at most a third too high.

Sampling with top-p, top-k or min-p renormalises over the tokens that it keeps, so behaviour log-probs are higher than
the model's. The trainer does not reproduce this; it subtracts what truncation can explain (`explained_by_sampling`), so
that the metrics measure engine against trainer with any sampling settings. The trainer does apply the temperature.
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
    """The most by which truncated sampling can raise a log-prob.

    Top-p keeps at least a probability mass of `top_p`. What top-k and min-p keep has no useful bound, so with these
    only log-probs below the trainer's count: an engine fault shifts log-probs in both directions.
    """
    if top_k or min_p:
        return math.inf
    return -math.log(top_p)


def unexplained(gap: Tensor, explained: float) -> Tensor:
    """[N] distances between log-probs beyond what truncated sampling explains; `gap` is behaviour minus trainer."""
    return torch.maximum(-gap, gap - explained).clamp_min(0.0)


def histogram(distances: Tensor) -> Tensor:
    """The number of distances in each bin."""
    bins = torch.bucketize(distances.double(), _EDGES.to(distances.device))
    return torch.bincount(bins, minlength=len(_EDGES) + 1).double()


def percentile(counts: Tensor) -> dict[str, float]:
    """The 99th percentile as a metric; empty if nothing was measured."""
    total = float(counts.sum())
    if not total:
        return {}
    bin_ = int((counts.cumsum(0) < _SHARE * total).sum())
    return {"mismatch_gap_p99": float(_EDGES[min(bin_, len(_EDGES) - 1)])}
