"""What a simulation is told: hardware facts, a model's shape, a cluster's layout and a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from dora_rl.core.config import Config
from dora_rl.orchestrator.config import ControlConfig, ModeName
from dora_rl.orchestrator.modes import MODES, LayoutKind


class Hardware(Config):
    """One accelerator, from its data sheet. Rates are per second, sizes in bytes."""

    flops: float = Field(..., gt=0)
    """Dense matrix multiplications in the precision of training."""
    memory_bytes: float = Field(..., gt=0)
    memory_bandwidth: float = Field(..., gt=0)
    link_bandwidth: float = Field(..., gt=0)
    """To devices of other instances."""
    host_bandwidth: float = Field(..., gt=0)
    """To the memory of its host."""


class ModelShape(Config):
    """What of a model determines its costs."""

    parameters: float = Field(..., gt=0)
    active_parameters: float | None = Field(None, gt=0)
    """Used per token; unset: all of them."""
    shared_parameters: float = Field(0.0, ge=0)
    """Of a mixture of experts: those outside the experts, which each rank holds. 0: not a mixture."""
    experts: int = Field(1, ge=1)
    """Per layer, of a mixture."""
    experts_per_token: int = Field(1, ge=1)
    bytes_per_parameter: float = Field(2.0, gt=0)
    """As served."""
    kv_bytes_per_token: float = Field(..., gt=0)

    @property
    def active(self) -> float:
        return self.active_parameters or self.parameters

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


class RolloutShape(Config):
    """How a rollout instance is built and how well it runs."""

    devices: int = Field(..., ge=1)
    """Per instance."""
    lock_step: bool = False
    """The devices are ranks of one expert-parallel group: each holds requests of its own, a step takes as long as
    its slowest rank, and empty ranks still run. Otherwise they share every request (tensor parallelism)."""
    slots: int = Field(1, ge=1)
    max_requests: int = Field(..., ge=1)
    """Sequences that decode at once, per instance."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """Of device memory, for weights and KV."""
    bandwidth_efficiency: float = Field(0.8, gt=0, le=1)
    """Of memory bandwidth, reached when reading weights and KV."""
    compute_efficiency: float = Field(0.5, gt=0, le=1)
    """Of peak FLOPs, reached in prefill and batched decode."""
    step_overhead: float = Field(..., ge=0)
    """Seconds that a decode step costs besides reading and computing: launches, scheduling, communication."""
    load_overhead: float = Field(1.0, ge=0)
    """Seconds to set up a load of weights."""
    move_overhead: float = Field(0.05, ge=0)
    """Seconds to set up a move of requests."""


class TrainerShape(Config):
    """How the trainer runs."""

    utilisation: float = Field(..., gt=0, le=1)
    """Of peak FLOPs."""
    passes: float = Field(6.0, gt=0)
    """FLOPs per active parameter and token: 6 for forward and backward, 8 with a forward pass for log-probs."""
    fixed_seconds: float = Field(0.0, ge=0)
    """Of a step, whatever the devices: data, optimiser, synchronisation."""
    publish_seconds: float = Field(1.0, ge=0)
    """From the optimiser's update to weights that can be loaded."""


class Workload(Config):
    """What the prompts ask for."""

    trace: Path | None = None
    """A JSONL file of observed trajectories to draw from, instead of the distribution below."""
    prompt_tokens: int = Field(256, ge=0)
    mean_tokens: float = Field(1000.0, gt=0)
    """Mean response length, after clipping to `control.max_response_tokens`."""
    sigma: float = Field(1.0, ge=0)
    """Of the lognormal's logarithm; 1 means that the 99th percentile is 10 times the median."""
    group_correlation: float = Field(0.5, ge=0, le=1)
    """How alike the lengths of siblings are: the share of the variance that lies between prompts."""
    turns: int = Field(1, ge=1)
    """Rounds of generating and tool use; the response is split evenly."""
    tool_seconds: float = Field(0.0, ge=0)
    """Median latency of a tool; lognormal with sigma 1."""
    tool_tokens: int = Field(0, ge=0)
    """Tokens that a tool returns."""
    reward_seconds: float = Field(0.0, ge=0)


class SimConfig(Config):
    """One simulation."""

    devices: int = Field(..., ge=1)
    steps: int = Field(10, ge=1)
    """Measured, after the warm-up."""
    warmup_steps: int = Field(4, ge=0)
    """Steps before measuring starts; at least the depth of the pipeline is sensible."""
    seed: int = 0
    control: ControlConfig
    hardware: Hardware
    model: ModelShape
    rollout: RolloutShape
    trainer: TrainerShape
    workload: Workload = Workload()
    layouts: dict[ModeName, LayoutKind] = Field(
        default_factory=lambda: {name: mode.layout for name, mode in MODES.items()}
    )
    """Who trains and who generates, by mode. Colocated: all devices do both, in turns. Disaggregated: each does one.
    Elastic: the trainer's devices generate too while they would idle."""
    trainer_devices: int | None = Field(None, ge=1)
    """Where layouts are disaggregated; unset: half of them."""
    elastic_trainer_devices: int | None = Field(None, ge=1)
    """Where layouts are elastic; unset: half of them."""

    def divide(self, layout: LayoutKind) -> tuple[int, int, int]:
        """Devices that train, instances that share them, and instances of their own."""
        per_instance = self.rollout.devices
        if layout == "colocated":
            return self.devices, self.devices // per_instance, 0
        asked = self.trainer_devices if layout == "disaggregated" else self.elastic_trainer_devices
        trainer = asked or self.devices // 2
        sharing = trainer // per_instance if layout == "elastic" else 0
        return trainer, sharing, (self.devices - trainer) // per_instance

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.control.group_size > self.rollout.max_requests:
            raise ValueError(
                f"'control.group_size' is {self.control.group_size}, but an instance takes only "
                f"{self.rollout.max_requests} requests: lower it or raise 'rollout.max_requests'"
            )
        for name in ("trainer_devices", "elastic_trainer_devices"):
            asked = getattr(self, name)
            if asked is not None and asked > self.devices:
                raise ValueError(f"'{name}' is {asked}, but there are only {self.devices} 'devices'")
        return self
