"""Presets: the clusters of the paper, a laptop, and larger ones."""

from __future__ import annotations

from typing import Any

from dora_rl.core.config import build, override
from dora_rl.core.errors import ConfigError
from dora_rl.sim.config import SimConfig

H800 = {
    "flops": 989e12,  # bfloat16, dense
    "memory_bytes": 80e9,
    "memory_bandwidth": 3.35e12,
    "link_bandwidth": 50e9,  # one 400 Gbit/s port a device
    "host_bandwidth": 50e9,  # PCIe 5, one direction, as reached
}

# Qwen2.5-32B: 64 layers, 8 KV heads of 128, bfloat16.
QWEN_32B = {"parameters": 32.5e9, "kv_bytes_per_token": 2 * 64 * 8 * 128 * 2}

PAPER: dict[str, Any] = {
    "control": {
        "groups_per_step": 512,
        "group_size": 16,
        "max_response_tokens": 30_000,
        "max_staleness": 3,
        "rebalance_seconds": 60.0,
    },
    "hardware": H800,
    "model": QWEN_32B,
    "rollout": {"devices": 2, "max_requests": 256, "step_overhead": 0.016},
    "trainer": {"utilisation": 0.32, "passes": 8.0, "fixed_seconds": 174.0, "publish_seconds": 2.0},
    "workload": {"prompt_tokens": 256, "mean_tokens": 2400.0, "sigma": 1.0, "group_correlation": 0.5},
    "steps": 8,
    "warmup_steps": 5,
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper-64": {**PAPER, "devices": 64},
    "paper-128": {**PAPER, "devices": 128},
}


def preset(name: str, assignments: list[str] | None = None) -> SimConfig:
    """A preset with dotted assignments applied."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}': choose from {', '.join(PRESETS)}")
    return build(SimConfig, override(PRESETS[name], assignments or []), source=name)
