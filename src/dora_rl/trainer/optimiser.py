"""AdamW with its schedule and gradient clipping, and optionally with its state in host memory.

Invariant: only a finite gradient is applied; the trainer checks `gradient_norm` before it calls `update`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dora_rl.core.errors import ConfigError
from dora_rl.trainer.config import OptimiserConfig


def learning_rate(config: OptimiserConfig, update: int) -> float:
    """The learning rate of an update; the first one is update 0."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    if config.schedule == "constant":
        return config.learning_rate
    assert config.total_updates is not None
    falling = max(1, config.total_updates - config.warmup_updates)
    done = min(1.0, (update - config.warmup_updates) / falling)
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * (config.final_share + (1 - config.final_share) * share)


class OptimiserSnapshot(NamedTuple):
    """Copies of weights and optimiser state."""

    weights: list[Tensor]
    state: dict[int, dict[str, Tensor]]
    updates: int


class Optimiser:
    """AdamW over the trainable parameters of a module."""

    def __init__(self, module: nn.Module, config: OptimiserConfig) -> None:
        self.config = config
        self.updates = 0
        trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in trainable:
            if parameter.dtype != torch.float32:
                raise ConfigError(
                    f"'{name}' is {str(parameter.dtype).removeprefix('torch.')}, too coarse for small updates: "
                    "load the model in float32 and set precision = 'bfloat16' for fast products"
                )
        self.names = [name for name, _ in trainable]
        self.parameters = [parameter for _, parameter in trainable]
        # With offload, AdamW updates copies in host memory; otherwise it updates the parameters themselves.
        self._master = [_host_copy(parameter) for parameter in self.parameters] if config.offload else self.parameters
        matrices = [tensor for tensor in self._master if tensor.ndim > 1]
        vectors = [tensor for tensor in self._master if tensor.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,  # one pass over weights, moments and gradients: the update is bound by memory
        )

    def gradient_norm(self, scale: float) -> float:
        """Norm of the accumulated gradient times `scale`, over all ranks."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm) * scale

    def update(self, scale: float, norm: float, rate_factor: float = 1.0) -> float:
        """One AdamW step with the accumulated gradient times `scale`, whose norm is `norm`; clears the gradients.

        Returns the learning rate, which is that of the schedule times `rate_factor`. If nothing was accumulated, the
        gradient is zero, and the moments decay accordingly.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        limit = self.config.max_gradient_norm
        if limit is not None and norm > limit:
            scale *= limit / (norm + 1e-6)
        rate = learning_rate(self.config, self.updates) * rate_factor
        for group in self.adamw.param_groups:
            group["lr"] = rate
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
        if self.config.offload:
            for parameter, master in zip(self.parameters, self._master, strict=True):
                master.grad = None if parameter.grad is None else _local(parameter.grad).to("cpu", master.dtype)
        self.adamw.step()
        self.updates += 1
        if self.config.offload:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self._master, strict=True):
                    _local(parameter).copy_(master)
                    master.grad = None
        self.clear()
        return rate

    def snapshot(self) -> OptimiserSnapshot:
        """Copies of the weights and of the state, with which `restore` undoes updates."""
        state = {
            index: {name: value.clone() for name, value in self.adamw.state[tensor].items()}
            for index, tensor in enumerate(self._master)
            if tensor in self.adamw.state
        }
        return OptimiserSnapshot(
            [_local(parameter).detach().clone() for parameter in self.parameters], state, self.updates
        )

    def restore(self, snapshot: OptimiserSnapshot) -> None:
        """Undo all updates since the snapshot."""
        self.clear()
        with torch.no_grad():
            for parameter, weights in zip(self.parameters, snapshot.weights, strict=True):
                _local(parameter).copy_(weights)
        self.adamw.state.clear()
        for index, values in snapshot.state.items():
            self.adamw.state[self._master[index]] = values
        self.updates = snapshot.updates
        self.refresh()

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by the names `moment.KIND.PARAMETER`, sharded like the parameters."""
        named: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self._master, strict=True):
            for kind, value in self.adamw.state.get(master, {}).items():
                named[f"moment.{kind}.{name}"] = _like(value, parameter)
        return named

    def allocate(self, names: set[str]) -> None:
        """Allocate zero moments for these parameters and none for the others; a checkpoint fills them."""
        self.adamw.state.clear()
        for name, master in zip(self.names, self._master, strict=True):
            if name in names:
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def load_moments(self, named: dict[str, Tensor]) -> None:
        """Load state with the names and the sharding of `moments`."""
        for name, master in zip(self.names, self._master, strict=True):
            for kind, value in self.adamw.state.get(master, {}).items():
                _local(value).copy_(_local(named[f"moment.{kind}.{name}"]))

    def refresh(self) -> None:
        """Update the copies in host memory after the module's weights were changed from outside."""
        if self.config.offload:
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self._master, strict=True):
                    master.copy_(_local(parameter))

    def clear(self) -> None:
        """Discard the accumulated gradient."""
        for parameter in self.parameters:
            parameter.grad = None


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all elements of the local shards are finite."""
    return all(bool(_local(gradient).isfinite().all()) for gradient in gradients)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """State of a parameter; as a sharded tensor if the parameter is sharded."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _host_copy(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(_local(parameter.detach()).to("cpu", torch.float32, copy=True))
