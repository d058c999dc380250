"""DAPO (Yu et al., arXiv 2503.14476): a higher upper bound and the mean over tokens.

Its dynamic sampling is `control.dynamic_sampling`, which other algorithms can use as well; its soft penalty for
overlong answers belongs in the reward.
"""

from __future__ import annotations

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip
from dora_rl.trainer.algorithms.grpo import normalised
from dora_rl.trainer.algorithms.losses import ppo_clip

DAPO = Algorithm(
    name="dapo", advantage=normalised, policy_loss=ppo_clip, aggregation="token_mean", clip=Clip(0.2, 0.28)
)
