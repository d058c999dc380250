"""Functions that several algorithms share: the PPO clip and the trust regions in its place, averaging, KL, and
corrections for the gap between the behaviour policy and the trainer's policy.

The gap and the ratio: let pi be the current policy, b the behaviour policy that sampled the trajectory, and a (the
anchor) the trainer's own policy at the start of the step; then pi/b = (pi/a) * (a/b). Without a correction, pi/b is the
ratio that a loss clips. With a correction, the loss clips pi/a, which the updates of this step have moved, and a/b,
which they can't move, becomes a weight without gradient that is truncated or masked. In both cases the importance
weight refers to the behaviour policy, except with the geometric mask, which drops trajectories and weighs none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Aggregation, Clip, Correction, TokenBatch, TokenLoss, TrustRegion

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


def masked_surrogate(tokens: TokenBatch, kept: Tensor) -> TokenLoss:
    """The surrogate without a clip: ratio times advantage of the tokens in `kept` [N], and nothing for the others."""
    import torch

    ratio = tokens.log_ratio.detach().exp()
    # Masked before the exponential: a ratio that overflows would otherwise give NaN instead of no gradient.
    used = torch.where(kept, tokens.log_ratio, torch.zeros_like(tokens.log_ratio)).exp()
    return TokenLoss(-used * tokens.advantages * kept, ratio, ~kept)


def divergence_kept(kind: TrustRegion, tokens: TokenBatch, delta: float) -> Tensor:
    """[N] whether DPPO keeps a token (arXiv 2602.04879).

    A token is masked if the advantage moves its probability further away from that under the policy that the ratio
    refers to, and the divergence of the two policies exceeds `delta` already. The divergence is that of the binary
    distributions "this token, or any other".
    """
    log_new, log_ratio = tokens.logprobs.detach().double(), tokens.log_ratio.detach().double()
    log_old = log_new - log_ratio
    new, old = log_new.exp(), log_old.exp()
    if kind == "binary_tv":
        divergence = (new - old).abs()
    else:
        # A probability that rounding has made 1 leaves the others at least this much, so that the logarithm is finite.
        others_new, others_old = (1 - new).clamp_min(1e-12), (1 - old).clamp_min(1e-12)
        divergence = -old * log_ratio + others_old * (others_old.log() - others_new.log())
    outwards = log_ratio * tokens.advantages > 0
    return ~(outwards & (divergence > delta))


def second_moment_kept(log_ratios: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """[N] whether M2PO keeps a token (arXiv 2510.01161); the arguments are [N] over all tokens of an update.

    Of the tokens that the advantage moves further away from the behaviour policy, those with the largest squared log
    ratio are masked until the mean square of the rest is at most `threshold`. Tokens with equal squares are masked
    together, so that the order of the tokens does not matter.
    """
    import torch

    squares = log_ratios.detach().double().square()
    outwards = log_ratios * advantages > 0
    ordered = squares[outwards].sort().values
    # The means of the k smallest squares grow with k.
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    count = int((means <= threshold).sum())
    if count == len(ordered):
        return torch.ones_like(outwards)
    return ~(outwards & (squares >= ordered[count]))


def vetoed(log_ratios: Tensor, tokens: TokenBatch, threshold: float) -> Tensor:
    """[N] whether a token's trajectory has a negative advantage and a token whose ratio is below `threshold`."""
    unlikely = (log_ratios < math.log(threshold)).to(log_ratios.dtype)
    found = sequence_sum(unlikely, tokens.sequence, len(tokens.lengths))[tokens.sequence] > 0
    return found & (tokens.advantages < 0)


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

    if kind.startswith(("sequence", "geometric")):
        log_gap = sequence_sum(log_gap, tokens.sequence, len(tokens.lengths))
        if kind == "geometric_mask":
            log_gap = log_gap / tokens.lengths
        log_gap = log_gap[tokens.sequence]
    gap = log_gap.exp()
    if kind.endswith("truncate"):
        return gap.clamp(max=high)
    # A geometric mean is no importance weight: it only decides whether the trajectory is trained.
    weight = torch.ones_like(gap) if kind == "geometric_mask" else gap
    return torch.where((gap >= low) & (gap <= high), weight, torch.zeros_like(gap))
