"""Computes, from the policy's output on a micro-batch, the sum that is differentiated.

The sum is not yet divided by the denominator of the aggregation: that is known only when the step closes, and dividing
by it then gives streamed and batched steps the same gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dora_rl.trainer.algorithms import get_algorithm
from dora_rl.trainer.algorithms.algorithm import TokenBatch
from dora_rl.trainer.algorithms.losses import (
    divergence_kept,
    gap_weights,
    kl_estimate,
    masked_surrogate,
    sequence_sum,
    token_weights,
    vetoed,
)
from dora_rl.trainer.config import AlgorithmConfig
from dora_rl.trainer.packing import MicroBatch
from dora_rl.trainer.policy import PolicyOutput


class References(NamedTuple):
    """[N] what the objective needs beside the policy's output: log-probs of the trained tokens under other policies,
    and what depends on the whole update."""

    reference: Tensor | None = None
    """Under the reference policy of the KL term."""
    anchor: Tensor | None = None
    """Under the trainer's own policy at the start of the step; None if this pass is at the start."""
    kept: Tensor | None = None
    """Whether the trust region `second_moment` keeps a token; None keeps all."""


class MicroLoss(NamedTuple):
    """What one micro-batch adds to the step."""

    total: Tensor
    """The sum to differentiate."""
    finite: Tensor
    """[S] false for a trajectory whose loss is not finite."""
    sums: dict[str, Tensor]
    """Sums over trained tokens, for metrics."""
    kl: Tensor
    """[S] estimates of KL(behaviour policy || policy), summed over the tokens of each trajectory."""
    gap: Tensor
    """[N] log-prob of each token under the behaviour policy minus that under the policy."""
    log_weight: Tensor
    """[S] log of the importance weight of each trajectory: its log-prob under the policy minus that under the behaviour
    policy, in float64."""
    max_ratio: Tensor


def micro_loss(
    config: AlgorithmConfig, output: PolicyOutput, batch: MicroBatch, advantages: Tensor, references: References
) -> MicroLoss:
    """The objective of one micro-batch; `advantages` [S]."""
    algorithm = get_algorithm(config.name)
    start = output.logprobs.detach() if references.anchor is None else references.anchor
    corrected = config.correction != "none"
    tokens = TokenBatch(
        log_ratio=output.logprobs - (start if corrected else batch.behaviour),
        logprobs=output.logprobs,
        advantages=advantages[batch.sequence],
        sequence=batch.sequence,
        lengths=batch.lengths,
    )
    if config.trust_region == "clip":
        policy = algorithm.policy_loss(tokens, config.bounds)
    elif config.trust_region == "second_moment":
        kept = references.kept
        policy = masked_surrogate(tokens, torch.ones_like(batch.sequence, dtype=torch.bool) if kept is None else kept)
    else:
        policy = masked_surrogate(tokens, divergence_kept(config.trust_region, tokens, config.delta))
    loss = policy.loss
    sums = {"tokens": torch.ones_like(start).sum(), "entropy": output.entropy.detach().sum()}
    if corrected:
        weights = gap_weights(config.correction, start - batch.behaviour, tokens, *config.correction_bounds)
        loss = loss * weights
        sums["correction"] = weights.sum()
    if config.veto is not None:
        out = vetoed(output.logprobs.detach() - batch.behaviour, tokens, config.veto)
        loss = torch.where(out, torch.zeros_like(loss), loss)
        sums["vetoed"] = (out / batch.lengths[batch.sequence]).sum()
    if config.kl_coefficient:
        assert references.reference is not None
        kl = kl_estimate(output.logprobs, references.reference)
        if config.kl_ratio:
            kl = kl * tokens.log_ratio.exp()
        loss = loss + config.kl_coefficient * kl
        sums["kl"] = kl.detach().sum()
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * output.entropy
    weighted = loss * token_weights(config.averaging, tokens, config.constant_length or 1)
    per_sequence = sequence_sum(weighted, batch.sequence, len(batch.lengths))
    now = output.logprobs.detach()
    divergence = kl_estimate(batch.behaviour, now)
    sums |= {
        "loss": per_sequence.detach().sum(),
        "ratio": policy.ratio.sum(),
        "clipped": policy.clipped.float().sum(),
    }
    return MicroLoss(
        total=per_sequence.sum(),
        finite=per_sequence.detach().isfinite(),
        sums=sums,
        kl=sequence_sum(divergence, batch.sequence, len(batch.lengths)),
        gap=batch.behaviour - now,
        log_weight=sequence_sum((now - batch.behaviour).double(), batch.sequence, len(batch.lengths)),
        max_ratio=policy.ratio.max(),
    )
