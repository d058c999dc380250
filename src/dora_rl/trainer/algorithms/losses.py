"""Functions that several algorithms share: the PPO clip, averaging, KL, and corrections for the engine-trainer gap.

The gap and the ratio: let pi be the current policy, b the behaviour policy that sampled the trajectory, and a (the
anchor) the trainer's own policy at the start of the step; then pi/b = (pi/a) * (a/b). Without a correction, pi/b is the
ratio that a loss clips. With a correction, the loss clips pi/a, which the updates of this step have moved, and a/b,
which they can't move, becomes a weight without gradient that is truncated or masked. In both cases the importance
weight refers to the behaviour policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Aggregation, Clip, Correction, TokenBatch, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor

    from dora_rl.core.trajectory import Trajectory


def sequence_sum(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """[S] the sums of [N] values over the tokens of each trajectory."""
    return values.new_zeros(count).index_add(0, sequence, values)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    """PPO's pessimistic bound, with an optional third bound on large ratios for negative advantages."""
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
    """The clipped surrogate of token ratios."""
    return clipped_surrogate(tokens.log_ratio.exp(), tokens.advantages, clip)


def token_weights(aggregation: Aggregation, tokens: TokenBatch, constant_length: int) -> Tensor:
    """[N] the weight of each token in the sum that is divided by the sum of `denominator`."""
    import torch

    if aggregation == "token_mean":
        return torch.ones_like(tokens.advantages)
    if aggregation == "sequence_mean":
        return tokens.lengths.to(tokens.advantages.dtype).reciprocal()[tokens.sequence]
    return torch.full_like(tokens.advantages, 1 / constant_length)


def denominator(aggregation: Aggregation, trajectory: Trajectory) -> int:
    """What one trajectory adds to the denominator. It does not need the loss, so gradients can be summed first."""
    return trajectory.response_length if aggregation == "token_mean" else 1


def kl_estimate(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, non-negative estimate of KL(policy || reference) from tokens sampled by the policy (Schulman's k3)."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def gap_weights(kind: Correction, log_gap: Tensor, tokens: TokenBatch, low: float, high: float) -> Tensor:
    """[N] weights that correct the gap between trainer and engine; `log_gap` is anchor minus behaviour log-prob."""
    import torch

    if kind.startswith("sequence"):
        log_gap = sequence_sum(log_gap, tokens.sequence, len(tokens.lengths))[tokens.sequence]
    gap = log_gap.exp()
    if kind.endswith("truncate"):
        return gap.clamp(max=high)
    return torch.where((gap >= low) & (gap <= high), gap, torch.zeros_like(gap))
