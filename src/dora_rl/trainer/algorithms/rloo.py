"""RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740): the baseline is the mean of the other siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.core.errors import ConfigError
from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, Rewards
from dora_rl.trainer.algorithms.losses import ppo_clip

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def leave_one_out(rewards: Rewards) -> list[NDArray[np.float64]]:
    """r minus the mean reward of the other siblings."""
    if any(len(group) < 2 for group in rewards):
        raise ConfigError("the advantage of 'rloo' needs groups of at least 2 trajectories: raise group_size")
    return [(group - group.mean()) * len(group) / (len(group) - 1) for group in rewards]


RLOO = Algorithm(
    name="rloo", advantage=leave_one_out, policy_loss=ppo_clip, aggregation="token_mean", clip=Clip(0.2, 0.2)
)
