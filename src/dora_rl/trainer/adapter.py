"""What of the model is trained and published: all weights, or a LoRA adapter over frozen ones.

Invariant: what is published are exactly the trained tensors under the names that `transformers` (or `peft`) gives
them, each once: tied weights are published under their first name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora_rl.core.errors import ConfigError
from dora_rl.core.ports import TensorSpec
from dora_rl.models.dtypes import spec
from dora_rl.trainer.config import LoraConfig, TrainerConfig
from dora_rl.trainer.packing import MicroBatch
from dora_rl.trainer.policy import Policy
from dora_rl.trainer.world import World, shard


def adapt(model: Any, lora: LoraConfig | None) -> Any | None:
    """Put an adapter into the model, whose own weights are frozen then; the `PeftModel` around it."""
    if lora is None:
        return None
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs peft: pip install 'dora-rl[lora]'") from error
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        return peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"'lora.targets': {str(error).splitlines()[0]}") from error


class Reference:
    """The policy that training started from, for KL: the base without its adapter, or a frozen copy."""

    def __init__(self, model: Any, config: TrainerConfig, world: World) -> None:
        self._copy: Policy | None = None
        if config.lora is None:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._copy = Policy(frozen, config.temperature)
            shard(self._copy, list(frozen.get_decoder().layers), world, config.precision)

    @torch.no_grad()
    def logprobs(self, policy: Policy, adapted: Any | None, batch: MicroBatch) -> Tensor:
        """[N] log-probs of the trained tokens."""
        if self._copy is not None:
            return self._copy(batch).logprobs  # type: ignore[no-any-return]
        assert adapted is not None
        with adapted.disable_adapter():
            return policy(batch).logprobs  # type: ignore[no-any-return]


def trained_state(model: Any, adapted: Any | None) -> dict[str, Tensor]:
    """The tensors of the policy that training changes, by name, tied ones once; shards where it is sharded."""
    if adapted is not None:
        import peft

        return dict(peft.get_peft_model_state_dict(adapted))
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def published(model: Any, adapted: Any | None) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    """What is published, described, and one by one as whole tensors: never a second copy of all of them."""
    state = trained_state(model, adapted)
    specs = [spec(name, tensor) for name, tensor in state.items()]
    return specs, (whole(tensor) for tensor in state.values())


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (by all processes together); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merged_state(model: Any, adapted: Any | None) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors of the policy under the names of the plain model; an adapter is added to what it adapts."""
    if adapted is None:
        yield from ((name, whole(tensor)) for name, tensor in trained_state(model, None).items())
        return
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, tensor in state.items():
        layer = layers.get(name.removesuffix(".base_layer.weight")) if name.endswith(".base_layer.weight") else None
        merged = whole(tensor)
        if layer is not None:
            (active,) = layer.lora_A
            a, b = whole(layer.lora_A[active].weight.detach()), whole(layer.lora_B[active].weight.detach())
            delta = (b @ a) * layer.scaling[active]
            merged = merged + (delta.T if layer.fan_in_fan_out else delta)
        yield name.replace(".base_layer.", "."), merged
