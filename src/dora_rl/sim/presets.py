"""Presets: a laptop, the clusters of the paper, and larger ones."""

from __future__ import annotations

from typing import Any

from dora_rl.core.config import build, override
from dora_rl.core.errors import ConfigError
from dora_rl.sim.config import SimConfig

H800 = {
    "flops": 989e12,  # bfloat16, dense
    "memory_bytes": 80e9,
    "memory_bandwidth": 3.35e12,
    "link_bandwidth": 50e9,  # one 400 Gbit/s port per device
    "host_bandwidth": 50e9,  # PCIe 5, one direction, as measured
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
    "rollout": {"devices": 2, "max_requests": 256, "step_overhead": 0.0102},
    "trainer": {"utilisation": 0.286, "passes": 8.0, "fixed_seconds": 172.3, "publish_seconds": 2.0},
    "workload": {"prompt_tokens": 256, "mean_tokens": 2400.0, "sigma": 1.0, "group_correlation": 0.5},
    "steps": 8,
    "warmup_steps": 5,
}

# LongCat-Flash: 560B parameters, about 27B active; 541B of them are in experts, 512 per layer, of which a token uses
# about 8; latent attention stores 576 values per token in each of its 56 attention blocks. Served in 8 bits.
LONGCAT = {
    "parameters": 560e9,
    "active_parameters": 27e9,
    "shared_parameters": 19e9,
    "experts": 512,
    "experts_per_token": 8,
    "bytes_per_parameter": 1.0,
    "kv_bytes_per_token": 56 * 576 * 2,
}

LONGCAT_CLUSTER: dict[str, Any] = {
    "control": {
        "groups_per_step": 2048,
        "group_size": 16,
        "max_response_tokens": 64_000,
        "max_staleness": 4,
        "rebalance_seconds": 60.0,
    },
    "hardware": H800,
    "model": LONGCAT,
    "rollout": {"devices": 32, "lock_step": True, "max_requests": 32 * 48, "step_overhead": 0.01},
    "trainer": {"utilisation": 0.3, "passes": 8.0, "fixed_seconds": 20.0, "publish_seconds": 5.0},
    "workload": {"prompt_tokens": 512, "mean_tokens": 10_000.0, "sigma": 1.0, "group_correlation": 0.5},
    "devices": 4096,
    "trainer_devices": 544,
    "steps": 6,
    "warmup_steps": 6,
}

# Four cores of a laptop and a 3M-parameter model in float32; each core is a device.
LAPTOP: dict[str, Any] = {
    "control": {
        "groups_per_step": 8,
        "group_size": 8,
        "max_response_tokens": 512,
        "max_staleness": 3,
        "rebalance_seconds": 2.0,
    },
    "hardware": {
        "flops": 91e9,
        "memory_bytes": 2e9,
        "memory_bandwidth": 21.5e9,
        "link_bandwidth": 8e9,
        "host_bandwidth": 8e9,
    },
    "model": {"parameters": 3.2e6, "bytes_per_parameter": 4.0, "kv_bytes_per_token": 2 * 4 * 256 * 4},
    "rollout": {
        "devices": 1,
        "max_requests": 64,
        "step_overhead": 0.002,
        "compute_efficiency": 0.25,
        "load_overhead": 0.01,
        "move_overhead": 0.002,
    },
    "trainer": {"utilisation": 0.58, "passes": 6.0, "fixed_seconds": 0.05, "publish_seconds": 0.02},
    "workload": {"prompt_tokens": 16, "mean_tokens": 64.0, "sigma": 1.0, "group_correlation": 0.5},
    "devices": 4,
    "trainer_devices": 2,
    "steps": 20,
    "warmup_steps": 5,
}

PRESETS: dict[str, dict[str, Any]] = {
    "laptop": LAPTOP,
    "paper-64": {**PAPER, "devices": 64, "elastic_trainer_devices": 38},
    "paper-128": {**PAPER, "devices": 128, "elastic_trainer_devices": 80},
    "longcat-4096": LONGCAT_CLUSTER,
    "cluster-40960": {
        **LONGCAT_CLUSTER,
        "control": {**LONGCAT_CLUSTER["control"], "groups_per_step": 16_384},
        "devices": 40_960,
        "trainer_devices": 5_440,
        "steps": 2,
        "warmup_steps": 3,
    },
}


def preset(name: str, assignments: list[str] | None = None) -> SimConfig:
    """Build the config of a preset with dotted assignments applied."""
    return build(SimConfig, override(preset_settings(name), assignments or []), source=name)


def preset_settings(name: str) -> dict[str, Any]:
    """The settings of a preset as a tree."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset '{name}': choose from {', '.join(PRESETS)}")
    return PRESETS[name]
