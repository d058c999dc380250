"""GRPO (Shao et al., DeepSeekMath, arXiv 2402.03300): rewards normalised within a group, PPO clip, sequence mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, Rewards
from dora_rl.trainer.algorithms.losses import ppo_clip

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Keeps the advantages of a group with equal rewards at zero; this value is in common use, so that results compare.
EPSILON = 1e-4


def normalised(rewards: Rewards) -> list[NDArray[np.float64]]:
    """(r - mean) / (sample standard deviation + epsilon), within each group."""
    return [(group - group.mean()) / ((group.std(ddof=1) if len(group) > 1 else 0.0) + EPSILON) for group in rewards]


GRPO = Algorithm(
    name="grpo", advantage=normalised, policy_loss=ppo_clip, aggregation="sequence_mean", clip=Clip(0.2, 0.2)
)
