"""CISPO (MiniMax-M1, arXiv 2506.13585): the clipped ratio is only a weight, so every token keeps its gradient."""

from __future__ import annotations

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, TokenBatch, TokenLoss
from dora_rl.trainer.algorithms.grpo import normalised


def bounded_weight(tokens: TokenBatch, clip: Clip) -> TokenLoss:
    """The policy gradient, weighted by the clipped ratio."""
    import torch

    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip.low, 1 + clip.high)
    return TokenLoss(-weight * tokens.advantages * tokens.logprobs, ratio, torch.ne(weight, ratio))


# As in the paper, the ratio has no lower bound: low = 1 puts the bound at 0.
CISPO = Algorithm(
    name="cispo", advantage=normalised, policy_loss=bounded_weight, aggregation="token_mean", clip=Clip(1.0, 0.28)
)
