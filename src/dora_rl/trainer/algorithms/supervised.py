"""Supervised fine-tuning: maximises the log-likelihood of given tokens, as a warm start for reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, Rewards, TokenBatch, TokenLoss

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def ones(rewards: Rewards) -> list[NDArray[np.float64]]:
    """Every example has the same weight."""
    import numpy as np

    return [np.ones_like(group) for group in rewards]


def negative_log_likelihood(tokens: TokenBatch, _: Clip) -> TokenLoss:
    """The tokens were not sampled by a policy, so there is no ratio and nothing to clip."""
    import torch

    ratio = torch.ones_like(tokens.advantages)
    return TokenLoss(-tokens.logprobs * tokens.advantages, ratio, torch.zeros_like(ratio, dtype=torch.bool))


SUPERVISED = Algorithm(
    name="supervised",
    advantage=ones,
    policy_loss=negative_log_likelihood,
    aggregation="token_mean",
    clip=Clip(0.0, 0.0),
)
