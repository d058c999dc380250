"""What of the model is trained and published: all weights, or a LoRA adapter over frozen ones.

Invariant: what is published are exactly the trained tensors under the names that `transformers` (or `peft`) gives
them, each once: tied weights are published under their first name.
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
from dora_rl.models.dtypes import spec
from dora_rl.models.lora import merge as lora_merge
from dora_rl.models.lora import transposed
from dora_rl.trainer.config import LoraConfig, TrainerConfig
from dora_rl.trainer.packing import MicroBatch
from dora_rl.trainer.policy import Form, Policy, sharded_policy
from dora_rl.trainer.rank_group import RankGroup


def adapt(model: Any, lora: LoraConfig | None) -> Any | None:
    """Put an adapter into the model, whose own weights are frozen then; the `PeftModel` around it."""
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
            # peft asks transformers by a name that is deprecated there, which is not for our users to mend.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")  # what it warns of is refused below
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"'lora.targets': {str(error).splitlines()[0]}") from error
    _check(model)
    return adapted


def _linear(model: Any) -> str | list[str]:
    """What `all-linear` means: of a mixture of experts its linear layers, without routers and fused experts, which are
    no layers and which no engine could add an adapter to."""
    if not any(parameter.dim() > 2 for parameter in model.parameters()):
        return "all-linear"
    head = model.get_output_embeddings()
    return [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and one is not head]


def _check(model: Any) -> None:
    """Every adapter can be added to the weights that it adapts, and to no others."""
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
    """The policy that training started from, for KL: the base without its adapter, or a frozen copy."""

    def __init__(self, model: Any, config: TrainerConfig, rank_group: RankGroup, form: Form) -> None:
        self._copy: Policy | None = None
        if config.lora is None:
            frozen = copy.deepcopy(model).requires_grad_(False)
            self._copy = sharded_policy(frozen, form, config, rank_group)

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

        # What is frozen is not published: peft would add the embeddings where they have an adapter.
        return dict(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
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
    settings = adapted.peft_config["default"]
    plain = (
        (name.replace(".base_layer.", "."), whole(tensor))
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    )
    # All processes gather the adapter: it is small.
    halves = {name: whole(tensor.detach()) for name, tensor in trained_state(model, adapted).items()}
    yield from lora_merge(plain, halves, scale=settings.lora_alpha / settings.r, transposed=transposed(model))
