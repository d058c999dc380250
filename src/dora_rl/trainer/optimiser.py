"""AdamW, its schedule, clipping, and its state in host memory where wanted.

Invariant: `update` either applies a finite gradient or leaves weights and state untouched.
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
    """The rate of update 0, 1, 2 ..."""
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
    """Weights and state at one moment."""

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
        # With offload, AdamW sees copies in host memory; otherwise the parameters themselves.
        self._hosted = [_host_copy(parameter) for parameter in self.parameters] if config.offload else self.parameters
        matrices = [tensor for tensor in self._hosted if tensor.ndim > 1]
        vectors = [tensor for tensor in self._hosted if tensor.ndim <= 1]
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
        """Norm of the accumulated gradient times `scale`, over all processes."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm) * scale

    def update(self, scale: float, norm: float) -> None:
        """One AdamW step with the accumulated gradient times `scale`, whose norm is `norm`; gradients are cleared.

        If nothing was accumulated the gradient is zero, and the moments go on with that.
        """
        if all(parameter.grad is None for parameter in self.parameters):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        limit = self.config.max_gradient_norm
        if limit is not None and norm > limit:
            scale *= limit / (norm + 1e-6)
        rate = learning_rate(self.config, self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
        if self.config.offload:
            for parameter, host in zip(self.parameters, self._hosted, strict=True):
                host.grad = None if parameter.grad is None else _local(parameter.grad).to("cpu", host.dtype)
        self.adamw.step()
        self.updates += 1
        if self.config.offload:
            with torch.no_grad():
                for parameter, host in zip(self.parameters, self._hosted, strict=True):
                    _local(parameter).copy_(host)
                    host.grad = None
        self.clear()

    def snapshot(self) -> OptimiserSnapshot:
        """Copies of the weights and of the state, to undo updates with."""
        state = {
            place: {name: value.clone() for name, value in self.adamw.state[tensor].items()}
            for place, tensor in enumerate(self._hosted)
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
        for place, values in snapshot.state.items():
            self.adamw.state[self._hosted[place]] = values
        self.updates = snapshot.updates
        self.refresh()

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state as `moment.KIND.PARAMETER`, sharded like the parameters."""
        named: dict[str, Tensor] = {}
        for name, parameter, host in zip(self.names, self.parameters, self._hosted, strict=True):
            for kind, value in self.adamw.state.get(host, {}).items():
                named[f"moment.{kind}.{name}"] = _like(value, parameter)
        return named

    def allocate(self, names: set[str]) -> None:
        """Zero moments for these parameters and none for the others, to be filled from a checkpoint."""
        self.adamw.state.clear()
        for name, host in zip(self.names, self._hosted, strict=True):
            if name in names:
                self.adamw.state[host] = {
                    "step": torch.zeros((), dtype=torch.float32, device=host.device),
                    "exp_avg": torch.zeros_like(host),
                    "exp_avg_sq": torch.zeros_like(host),
                }

    def take_moments(self, named: dict[str, Tensor]) -> None:
        """Take the state over from the form of `moments`."""
        for name, host in zip(self.names, self._hosted, strict=True):
            for kind, value in self.adamw.state.get(host, {}).items():
                _local(value).copy_(_local(named[f"moment.{kind}.{name}"]))

    def refresh(self) -> None:
        """Take over weights that were loaded into the module from elsewhere."""
        if self.config.offload:
            with torch.no_grad():
                for parameter, host in zip(self.parameters, self._hosted, strict=True):
                    host.copy_(_local(parameter))

    def clear(self) -> None:
        """Forget the accumulated gradient."""
        for parameter in self.parameters:
            parameter.grad = None


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether every element of the local parts is a number."""
    return all(bool(_local(gradient).isfinite().all()) for gradient in gradients)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A part of the state of a sharded parameter, as a sharded tensor."""
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
