"""Dr. GRPO (Liu et al., arXiv 2503.20783): no division by the standard deviation or by the length; both are biased."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, Rewards
from dora_rl.trainer.algorithms.losses import ppo_clip

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def centred(rewards: Rewards) -> list[NDArray[np.float64]]:
    """r - mean, within each group."""
    return [group - group.mean() for group in rewards]


DR_GRPO = Algorithm(
    name="dr_grpo", advantage=centred, policy_loss=ppo_clip, aggregation="constant_length", clip=Clip(0.2, 0.2)
)
