"""Pieces that several algorithms share: the PPO clip, averaging, KL, and corrections for the gap between engines.

The gap and the ratio. With pi the policy now, b the behaviour log-probs that came with the trajectory, and a (the
anchor) the trainer's own log-probs at the start of the step, pi/b = (pi/a) * (a/b). Without a correction the whole
of pi/b is the ratio that a loss clips. With one, the loss clips pi/a, which the updates of this step have moved, and
a/b, which they can't move, becomes a weight without gradient that is truncated or masked. Either way the importance
weight is to the behaviour policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Aggregation, Clip, Correction, TokenBatch, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from dora_rl.core.trajectory import Trajectory


def sequence_sum(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """[S] sums of [N] over the tokens of each trajectory."""
    return values.new_zeros(count).index_add(0, sequence, values)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    """PPO's pessimistic bound, with an optional third bound for large ratios at negative advantages."""
    import torch

    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + clip.high)) | ((advantages < 0) & (ratio < 1 - clip.low))
    if clip.negative is not None:
        floor = clip.negative * advantages
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
        clipped |= (advantages < 0) & (ratio > clip.negative)
    return TokenLoss(-gain, ratio.detach(), clipped.detach())


def ppo_clip(tokens: TokenBatch, clip: Clip) -> TokenLoss:
    """The surrogate on token ratios."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, clip)


def token_weights(aggregation: Aggregation, tokens: TokenBatch, constant_length: int) -> Tensor:
    """[N] the share of each token in the sum that `denominator` divides."""
    import torch

    if aggregation == "token_mean":
        return torch.ones_like(tokens.advantages)
    if aggregation == "sequence_mean":
        return tokens.lengths.to(tokens.advantages.dtype).reciprocal()[tokens.sequence]
    return torch.full_like(tokens.advantages, 1 / constant_length)


def denominator(aggregation: Aggregation, trajectory: Trajectory) -> int:
    """What one trajectory adds to the denominator; known without its loss, so that gradients can be summed first."""
    return trajectory.response_length if aggregation == "token_mean" else 1


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(policy || reference) from tokens of the policy (Schulman's k3)."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def gap_weights(kind: Correction, log_gap: Tensor, tokens: TokenBatch, low: float, high: float) -> Tensor:
    """[N] weights for the gap between trainer and engine; `log_gap` is anchor minus behaviour, without gradient."""
    import torch

    if kind.startswith("sequence"):
        log_gap = sequence_sum(log_gap, tokens.sequence, len(tokens.lengths))[tokens.sequence]
    gap = log_gap.exp()
    if kind.endswith("truncate"):
        return gap.clamp(max=high)
    return torch.where((gap >= low) & (gap <= high), gap, torch.zeros_like(gap))
