"""What a step reports, under the field's names."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dora_rl.core.trajectory import Group
from dora_rl.core.types import StepId
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
)


def of_groups(groups: Sequence[Group], step: StepId) -> dict[str, float]:
    """What the trajectories themselves say."""
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


def of_tokens(sums: dict[str, float], max_ratio: float, denominator: int) -> dict[str, float]:
    """Means over trained tokens; a name is absent where nothing was measured."""
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
    metrics["loss"] = sums["loss"] / denominator
    if sums.get("fresh_tokens"):
        # Only where rollout and trainer hold the same version does their difference come from the engines alone.
        metrics["mismatch_kl"] = sums["mismatch_kl"] / sums["fresh_tokens"]
        metrics["mismatch_gap"] = sums["mismatch_gap"] / sums["fresh_tokens"]
        metrics["mismatch_tokens"] = sums["fresh_tokens"]
    return metrics


def of_experts(load: Sequence[torch.Tensor]) -> dict[str, float]:
    """How unevenly experts are used: 1 is even, the number of experts is the worst."""
    if not load:
        return {}
    shares = [counts.float() * len(counts) / counts.sum() for counts in load]
    return {
        "moe/load_max": max(float(share.max()) for share in shares),
        "moe/load_std": float(np.mean([float(share.std(correction=0)) for share in shares])),
        "moe/unused_experts": float(sum(int((counts == 0).sum()) for counts in load)),
    }


def add_load(total: list[torch.Tensor], routers: Routers, *, counts: bool) -> None:
    """Add the expert load of the last forward pass. One that does not count adds zeros, so that all processes have as
    many loads to sum, also those without work of their own."""
    load = [one * counts for one in routers.load()]
    if not total:
        total.extend(load)
        return
    for sum_, one in zip(total, load, strict=True):
        sum_ += one


def training_flops(model: Any, tokens: int, attended: int) -> float:
    """Forward and backward of `tokens` tokens with `attended` (query, key) pairs.

    Three times the forward pass: 2 for each weight that multiplies a token, and 4 for each pair, head and its width.
    """
    config = model.config.get_text_config()
    skipped = model.get_input_embeddings().weight
    tied = skipped is model.get_output_embeddings().weight
    weights: float = sum(parameter.numel() for parameter in model.parameters()) - (0 if tied else skipped.numel())
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
    """The best rate of a large float32 product on this device, measured once: the yardstick for `mfu`."""
    size = 1024
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        result = a @ b
        result[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
