"""The metrics of a step, under the names in common use."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dora_rl.core.trajectory import Group
from dora_rl.core.types import StepId
from dora_rl.trainer import effective_samples
from dora_rl.trainer.moe import Routers

SUMS = (
    "tokens",
    "loss",
    "entropy",
    "ratio",
    "clipped",
    "correction",
    "kl",
    "fresh_tokens",
    "mismatch_kl",
    "mismatch_gap",
    "policy_kl",
    "vetoed",
    *effective_samples.KEYS,
)


def group_metrics(groups: Sequence[Group], step: StepId) -> dict[str, float]:
    """Metrics that depend on the trajectories only."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    lengths = np.array([trajectory.response_length for trajectory in trajectories])
    staleness = np.array([step - trajectory.version for trajectory in trajectories])
    truncated = np.array([trajectory.stop_reason == "length" for trajectory in trajectories])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/truncated": float(truncated.mean()),
        "off_policy/trajectory_staleness": float(staleness.mean()),
        "off_policy/trajectory_staleness_max": float(staleness.max()),
        "batch/groups": float(len(groups)),
        "batch/trajectories": float(len(trajectories)),
    }


def token_metrics(sums: dict[str, float], max_ratio: float, denominator: int) -> dict[str, float]:
    """Means over trained tokens; a metric is absent if nothing was measured for it."""
    tokens = sums.get("tokens")
    if not tokens:
        return {}
    named = {
        "entropy": "entropy",
        "ratio": "ratio/mean",
        "clipped": "clip_fraction",
        "policy_kl": "off_policy/kl",
        "kl": "reference_kl",
        "correction": "correction/mean",
    }
    metrics = {name: sums[key] / tokens for key, name in named.items() if key in sums}
    metrics["ratio/max"] = max_ratio
    size = effective_samples.relative_size(sums)
    if size is not None:
        metrics["off_policy/ess"] = size
    if "vetoed" in sums and sums.get("weighed"):
        metrics["off_policy/vetoed"] = sums["vetoed"] / sums["weighed"]
    metrics["loss"] = sums["loss"] / denominator
    if sums.get("fresh_tokens"):
        # If rollout and trainer hold the same version, their difference has no other cause than the two engines.
        metrics["mismatch_kl"] = sums["mismatch_kl"] / sums["fresh_tokens"]
        metrics["mismatch_gap"] = sums["mismatch_gap"] / sums["fresh_tokens"]
        metrics["mismatch_tokens"] = sums["fresh_tokens"]
    return metrics


def expert_metrics(load: Sequence[torch.Tensor]) -> dict[str, float]:
    """How unevenly tokens are spread over the experts: `load_max` is 1 if evenly, at worst the number of experts."""
    if not load:
        return {}
    shares = [counts.float() * len(counts) / counts.sum() for counts in load]
    return {
        "moe/load_max": max(float(share.max()) for share in shares),
        "moe/load_std": float(np.mean([float(share.std(correction=0)) for share in shares])),
        "moe/unused_experts": float(sum(int((counts == 0).sum()) for counts in load)),
    }


def add_expert_load(total: list[torch.Tensor], routers: Routers, *, include: bool) -> None:
    """Add the expert load of the last forward pass. With `include=False` zeros are added, so that all ranks have the
    same number of loads to reduce, also ranks without a micro-batch."""
    load = [counts * include for counts in routers.load()]
    if not total:
        total.extend(load)
        return
    for sum_, counts in zip(total, load, strict=True):
        sum_ += counts


def training_flops(model: Any, tokens: int, attended: int) -> float:
    """Floating-point operations of a forward and backward pass over `tokens` tokens with `attended` (query, key) pairs.

    This is three times the forward pass, which has 2 operations per token and weight, and 4 per pair and head width.
    """
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings().weight  # looked up, not multiplied, unless they are the output's too
    tied = embeddings is model.get_output_embeddings().weight
    weights: float = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else embeddings.numel())
    experts, used = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    if experts and used:
        routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        weights -= routed * (1 - used / experts)
    heads = getattr(config, "num_attention_heads", 0)  # a recurrent model has none
    head = getattr(config, "head_dim", None) or config.hidden_size // max(1, heads)
    width: int = config.num_hidden_layers * heads * head
    return 3.0 * (2.0 * weights * tokens + 4.0 * width * attended)


@functools.cache
def peak_flops(device: str) -> float:
    """The best measured rate of a large float32 matrix product on this device: the reference of `mfu`."""
    size = 1024
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        result = a @ b
        result[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
