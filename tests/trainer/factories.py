"""Small real models and random groups for the trainer's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.trainer import Trainer

VOCABULARY = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def llama(seed: int = 0, **changes: Any) -> Any:
    """A two-layer Llama with grouped heads."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        **SMALL,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def moe(kind: str = "qwen3", seed: int = 0) -> Any:
    """A two-layer mixture of 6 experts, 2 for each token."""
    torch.manual_seed(seed)
    common: dict[str, Any] = SMALL | {"num_experts_per_tok": 2}
    config: Any
    if kind == "qwen3":
        config = Qwen3MoeConfig(**common, num_experts=6, moe_intermediate_size=24, norm_topk_prob=True)
    else:
        config = MixtralConfig(**common, num_local_experts=6)
    return AutoModelForCausalLM.from_config(config).eval()


def groups(
    count: int = 3,
    size: int = 4,
    *,
    seed: int = 0,
    longest: int = 40,
    version: int = 0,
    first: int = 0,
    noise: float = 0.4,
    model: Any = None,
    holes: bool = True,
) -> list[Group]:
    """Groups with shared prompts, responses of different lengths and masked tokens inside.

    With a model, behaviour log-probs are the model's own plus noise, so that ratios are around one.
    """
    random = np.random.default_rng(seed)
    made = []
    for number in range(first, first + count):
        prompt = random.integers(0, VOCABULARY, random.integers(1, 9))
        siblings = []
        for sibling in range(size):
            response = random.integers(0, VOCABULARY, random.integers(1, longest))
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            if holes and len(response) > 6:
                mask[len(prompt) + 2 : len(prompt) + 4] = False  # as for the tokens of an environment
            behaviour = plain_logprobs(model, tokens) if model is not None else -random.random(len(tokens)) * 4
            behaviour = np.minimum(behaviour + noise * random.standard_normal(len(tokens)), 0)
            siblings.append(
                Trajectory(
                    id=number * size + sibling,
                    version=version,
                    tokens=tokens,
                    loss_mask=mask,
                    behaviour_logprobs=behaviour.astype(np.float32),
                    reward=float(random.integers(0, 4)) / 2 + (sibling == 0),
                )
            )
        made.append(Group(id=number, trajectories=tuple(siblings)))
    return made


def plain_logprobs(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log-probs of each token except the first, from one unpacked forward pass."""
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()
    return np.concatenate([np.zeros(1), picked])


def trainer(model: Any, **settings: Any) -> Trainer:
    """A trainer with settings as in a config file."""
    return Trainer(model, TrainerConfig.model_validate(settings))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The accumulated gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Equal relative to the largest element of all gradients, tensor by tensor."""
    assert found.keys() == wanted.keys()
    scale = max(float(tensor.abs().max()) for tensor in wanted.values())
    assert scale > 0
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"
