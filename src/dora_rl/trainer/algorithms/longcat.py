"""The recipe of the LongCat-Flash-Thinking report (arXiv 2509.18883): triplet clip, constant-length denominator.

There are three bounds: a lower and an upper one for negative advantages, and an upper one for positive advantages. The
upper bound for negative advantages keeps a token that the policy has made much likelier from blowing up the gradient.
The report also truncates the gap between engine and trainer: set `correction = "token_truncate"` for that.
"""

from __future__ import annotations

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip
from dora_rl.trainer.algorithms.grpo import normalised
from dora_rl.trainer.algorithms.losses import ppo_clip

# The first two bounds are DAPO's; the third is the usual one of dual-clip PPO (arXiv 1912.09729).
LONGCAT = Algorithm(
    name="longcat",
    advantage=normalised,
    policy_loss=ppo_clip,
    aggregation="constant_length",
    clip=Clip(low=0.2, high=0.28, negative=3.0),
)
