"""REINFORCE++ (Hu et al., arXiv 2501.03262): advantages normalised over all trajectories of the step.

The baseline variant first subtracts the mean of the group. Both variants need the rewards of the whole step, so the
trainer collects the groups as they finish and computes the gradient when the step closes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, Rewards
from dora_rl.trainer.algorithms.dr_grpo import centred
from dora_rl.trainer.algorithms.grpo import EPSILON
from dora_rl.trainer.algorithms.losses import ppo_clip

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def normalised_over_step(rewards: Rewards) -> list[NDArray[np.float64]]:
    """(r - mean) / (standard deviation + epsilon), over all trajectories of the step."""
    import numpy as np

    flat = np.concatenate(rewards)
    return [(group - flat.mean()) / (flat.std() + EPSILON) for group in rewards]


def centred_then_normalised(rewards: Rewards) -> list[NDArray[np.float64]]:
    """r - mean of the group, normalised over the step."""
    return normalised_over_step(centred(rewards))


REINFORCE_PP = Algorithm(
    name="reinforce_pp",
    advantage=normalised_over_step,
    scope="step",
    policy_loss=ppo_clip,
    aggregation="token_mean",
    clip=Clip(0.2, 0.2),
)
REINFORCE_PP_BASELINE = Algorithm(
    name="reinforce_pp_baseline",
    advantage=centred_then_normalised,
    scope="step",
    policy_loss=ppo_clip,
    aggregation="token_mean",
    clip=Clip(0.2, 0.2),
)
