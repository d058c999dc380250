"""Which tensors of the model are trained and published: all weights, or a LoRA adapter over frozen weights.

Invariant: exactly the trained tensors are published, each once, under the names that `transformers` (or `peft`) gives
them; tied weights are published under their first name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dora_rl.core.errors import ConfigError
from dora_rl.core.interfaces import TensorSpec
from dora_rl.models import lora as lora_weights
from dora_rl.models.dtypes import spec
from dora_rl.trainer.config import LoraConfig, TrainerConfig
from dora_rl.trainer.packing import MicroBatch
from dora_rl.trainer.policy import Form, Policy, sharded_policy
from dora_rl.trainer.rank_group import RankGroup


def add_adapter(model: Any, lora: LoraConfig | None) -> Any | None:
    """Insert an adapter into the model and freeze the model's own weights; returns the `PeftModel` around it."""
    if lora is None:
        return None
    try:
        import peft
    except ImportError as error:
        raise ConfigError("LoRA needs peft: pip install 'dora-rl[lora]'") from error
    targets = _linear(model) if isinstance(lora.targets, str) else list(lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            # peft uses a name that is deprecated in transformers; our users can't change that.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # `_check` refuses what it warns of
            peft_model = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"'lora.targets': {str(error).splitlines()[0]}") from error
    _check(model)
    return peft_model


def _linear(model: Any) -> str | list[str]:
    """What `all-linear` means for this model.

    For a mixture of experts these are its linear layers. Routers and fused experts are not linear layers, and no engine
    can add an adapter to them.
    """
    if not any(parameter.dim() > 2 for parameter in model.parameters()):
        return "all-linear"
    head = model.get_output_embeddings()
    return [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head]


def _check(model: Any) -> None:
    """Refuse an adapter that can't be added to the weights that it adapts, or that would change other weights too."""
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        base = module.base_layer
        kind = type(base).__name__
        if not isinstance(base, torch.nn.Linear | torch.nn.Embedding) and kind != "Conv1D":
            raise ConfigError(
                f"'trainer.lora.targets': '{name}' is a {kind}, not a linear layer, and can't have an adapter; name "
                "linear layers, for instance q_proj, k_proj, v_proj and o_proj"
            )
        if tied and name.rpartition(".")[2] in ("embed_tokens", "wte", "lm_head"):
            raise ConfigError(
                f"'trainer.lora.targets': '{name}' is tied to other embeddings in this model, so an adapter for one of "
                "them can't be added to the weights; leave it out"
            )


class Reference:
    """The reference policy of the KL term: the base model without its adapter, or a frozen copy of the model."""

    def __init__(self, model: Any, config: TrainerConfig, rank_group: RankGroup, form: Form) -> None:
        self._copy: Policy | None = None
        if config.lora is None:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._copy = sharded_policy(frozen, form, config, rank_group)

    @torch.no_grad()
    def logprobs(self, policy: Policy, peft_model: Any | None, batch: MicroBatch) -> Tensor:
        """[N] log-probs of the trained tokens."""
        if self._copy is not None:
            return self._copy(batch).logprobs  # type: ignore[no-any-return]
        assert peft_model is not None
        with peft_model.disable_adapter():
            return policy(batch).logprobs  # type: ignore[no-any-return]


def trained_state(model: Any, peft_model: Any | None) -> dict[str, Tensor]:
    """The tensors that training changes, by name; tied ones appear once, and sharded ones stay sharded."""
    if peft_model is not None:
        import peft

        # Frozen weights are not published: by default peft would add the embeddings if they have an adapter.
        return dict(peft.get_peft_model_state_dict(peft_model, save_embedding_layers=False))
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def published_tensors(model: Any, peft_model: Any | None) -> tuple[list[TensorSpec], Iterator[Tensor]]:
    """The specs of the published tensors, and the full tensors one by one, so that there is no second copy of all."""
    state = trained_state(model, peft_model)
    specs = [spec(name, tensor) for name, tensor in state.items()]
    return specs, (full_tensor(tensor) for tensor in state.values())


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor (all ranks take part); any other tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def merged_state(model: Any, peft_model: Any | None) -> Iterator[tuple[str, Tensor]]:
    """The full tensors of the policy under the names of the plain model, with the adapter merged into its weights."""
    if peft_model is None:
        yield from ((name, full_tensor(tensor)) for name, tensor in trained_state(model, None).items())
        return
    settings = peft_model.peft_config["default"]
    base = ((name, full_tensor(tensor)) for name, tensor in lora_weights.base_weights(model))
    # All ranks gather the whole adapter, since it is small.
    adapter = {name: full_tensor(tensor.detach()) for name, tensor in trained_state(model, peft_model).items()}
    transposed = lora_weights.transposed(model)
    yield from lora_weights.merge(base, adapter, scale=settings.lora_alpha / settings.r, transposed=transposed)
