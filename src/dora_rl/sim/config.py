"""The configuration of a simulation: hardware, model size, cluster layout and workload."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from dora_rl.core.config import Config
from dora_rl.orchestrator.config import ControlConfig, ModeName
from dora_rl.orchestrator.modes import MODES, LayoutKind


class Hardware(Config):
    """One accelerator, as in its data sheet. Rates are per second, sizes in bytes."""

    flops: float = Field(..., gt=0)
    """FLOP/s of dense matrix multiplications in the training precision."""
    memory_bytes: float = Field(..., gt=0)
    memory_bandwidth: float = Field(..., gt=0)
    link_bandwidth: float = Field(..., gt=0)
    """Bandwidth to the devices of other instances."""
    host_bandwidth: float = Field(..., gt=0)
    """Bandwidth to host memory."""


class ModelShape(Config):
    """The properties of a model that determine its costs."""

    parameters: float = Field(..., gt=0)
    active_parameters: float | None = Field(None, gt=0)
    """Parameters used per token; unset means all."""
    shared_parameters: float = Field(0.0, ge=0)
    """Parameters of a mixture of experts that are outside the experts; each rank holds them. 0 means not a mixture."""
    experts: int = Field(1, ge=1)
    """Experts per layer of a mixture."""
    experts_per_token: int = Field(1, ge=1)
    bytes_per_parameter: float = Field(2.0, gt=0)
    """Bytes per parameter as served."""
    kv_bytes_per_token: float = Field(..., gt=0)

    @property
    def active(self) -> float:
        return self.active_parameters or self.parameters

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


class RolloutShape(Config):
    """The layout and efficiency of a rollout instance."""

    devices: int = Field(..., ge=1)
    """Devices per instance."""
    lock_step: bool = False
    """True: the devices are ranks of one expert-parallel group, each with separate requests. A step takes as long as
    its slowest rank, and empty ranks still run. False: the devices share every request (tensor parallelism)."""
    slots: int = Field(1, ge=1)
    max_requests: int = Field(..., ge=1)
    """Sequences that an instance decodes at once."""
    memory_share: float = Field(0.9, gt=0, le=1)
    """Share of device memory for weights and KV cache."""
    bandwidth_efficiency: float = Field(0.8, gt=0, le=1)
    """Share of memory bandwidth reached when reading weights and KV cache."""
    compute_efficiency: float = Field(0.5, gt=0, le=1)
    """Share of peak FLOP/s reached in prefill and batched decode."""
    step_overhead: float = Field(..., ge=0)
    """Seconds of a decode step besides reading and computing: kernel launches, scheduling, communication."""
    load_overhead: float = Field(1.0, ge=0)
    """Seconds to set up a load of weights."""
    move_overhead: float = Field(0.05, ge=0)
    """Seconds to set up a move of requests."""


class TrainerShape(Config):
    """The speed of the trainer."""

    utilisation: float = Field(..., gt=0, le=1)
    """Share of peak FLOP/s."""
    passes: float = Field(6.0, gt=0)
    """FLOPs per active parameter and token: 6 for forward and backward, 8 with a forward pass for log-probs."""
    fixed_seconds: float = Field(0.0, ge=0)
    """Seconds of a step that do not depend on the number of devices: data, optimiser, synchronisation."""
    publish_seconds: float = Field(1.0, ge=0)
    """Seconds from the optimiser's update until the weights can be loaded."""


class Workload(Config):
    """The lengths and latencies of trajectories."""

    trace: Path | None = None
    """A JSONL file of observed trajectories to draw from instead of the distribution below."""
    prompt_tokens: int = Field(256, ge=0)
    mean_tokens: float = Field(1000.0, gt=0)
    """Mean response length, after clipping to `control.max_response_tokens`."""
    sigma: float = Field(1.0, ge=0)
    """Standard deviation of the logarithm of the length; 1 makes the 99th percentile 10 times the median."""
    group_correlation: float = Field(0.5, ge=0, le=1)
    """Correlation of the lengths of siblings: the share of the variance that is between prompts."""
    turns: int = Field(1, ge=1)
    """Rounds of generation and tool use; the response is split evenly over them."""
    tool_seconds: float = Field(0.0, ge=0)
    """Median latency of a tool call; the distribution is lognormal with sigma 1."""
    tool_tokens: int = Field(0, ge=0)
    """Tokens that a tool returns."""
    reward_seconds: float = Field(0.0, ge=0)
    no_signal: float = Field(0.0, ge=0, lt=1)
    """Share of the groups whose rewards are all equal; they are replaced if `control.dynamic_sampling` says so."""


class SimConfig(Config):
    """One simulation."""

    devices: int = Field(..., ge=1)
    steps: int = Field(10, ge=1)
    """Steps that are measured, after the warm-up."""
    warmup_steps: int = Field(4, ge=0)
    """Steps before the measurement starts; use at least the depth of the pipeline."""
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
    """Which devices train and which generate, by mode. Colocated: all devices do both, in turns. Disaggregated: each
    device does one of the two. Elastic: the trainer's devices also generate while they would otherwise be idle."""
    trainer_devices: int | None = Field(None, ge=1)
    """Devices of the trainer in disaggregated layouts; unset means half of all."""
    elastic_trainer_devices: int | None = Field(None, ge=1)
    """Devices of the trainer in elastic layouts; unset means half of all."""

    def divide(self, layout: LayoutKind) -> tuple[int, int, int]:
        """The number of trainer devices, of instances that share them, and of instances on dedicated devices."""
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
