"""GSPO (Zheng et al., arXiv 2507.18071): one ratio per trajectory, the geometric mean of its token ratios."""

from __future__ import annotations

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, TokenBatch, TokenLoss
from dora_rl.trainer.algorithms.grpo import normalised
from dora_rl.trainer.algorithms.losses import clipped_surrogate, sequence_sum


def sequence_clip(tokens: TokenBatch, clip: Clip) -> TokenLoss:
    """The clipped surrogate of trajectory ratios, repeated for each token."""
    log_ratio = sequence_sum(tokens.log_ratio, tokens.sequence, len(tokens.lengths)) / tokens.lengths
    return clipped_surrogate(log_ratio[tokens.sequence].exp(), tokens.advantages, clip)


# Trajectory ratios vary far less than token ratios; the bounds are the paper's.
GSPO = Algorithm(
    name="gspo", advantage=normalised, policy_loss=sequence_clip, aggregation="sequence_mean", clip=Clip(3e-4, 4e-4)
)
