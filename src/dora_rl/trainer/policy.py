"""The policy in the trainer: packed trajectories in, log-probs and entropies of trained tokens out.

It is one module around the model, so that sharding can treat embeddings, decoder and head as one module. The head is
computed for the trained tokens only.

A model is trained in the first form that reproduces the log-probs of its plain forward pass (`choose_form`): packed if
it uses the attention interface of `transformers`, otherwise in rows padded on the right; with a plain matrix product as
head if its logits are nothing else, otherwise with the module's own head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dora_rl.core.errors import ModelError
from dora_rl.core.trajectory import Trajectory
from dora_rl.models import exactness, head
from dora_rl.models.exactness import ExactnessDifference
from dora_rl.models.packed import NAME
from dora_rl.models.text import model_context
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.packing import MicroBatch, pack
from dora_rl.trainer.rank_group import RankGroup, shard

# Model settings that make the logits more than the product of hidden states and output embeddings.
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
HOW = "packed sequences that share a prompt"
"""What is compared with the plain forward pass, as error messages name it."""


class PolicyOutput(NamedTuple):
    """The values of the N trained tokens of a micro-batch."""

    logprobs: Tensor
    """[N]"""
    entropy: Tensor
    """[N]"""


class Form(NamedTuple):
    """How a model is called."""

    packed: bool = True
    """Packed attention; if false, trajectories are rows of a padded batch and prompts are not shared."""
    product_head: bool = True
    """The logits are the product of hidden states and output embeddings."""
    attention: str = NAME
    """The attention implementation."""


class Policy(nn.Module):
    """A `transformers` causal LM over packed trajectories."""

    def __init__(self, model: Any, temperature: float, form: Form | None = None, *, one_bucket: bool = False) -> None:
        super().__init__()
        self.form = form or Form(product_head=_product_head(model))
        exactness.set_attention(model, self.form.attention)
        self.model = model
        self.training = False  # like the model inside, except for layers that recompute their activations
        self.temperature = temperature
        self._one_bucket = one_bucket
        """Call the model once per micro-batch, since all ranks of a sharded model must call it equally often."""

    def forward(self, batch: MicroBatch, temperature: float | None = None) -> PolicyOutput:
        """Log-probs and entropies at the given temperature, by default the one that rollout samples with."""
        temperature = self.temperature if temperature is None else temperature
        if self.form.product_head:
            states = self._run(self.model.get_decoder(), batch, "last_hidden_state")
            weight = self.model.get_output_embeddings().weight
            return PolicyOutput(*head.logprobs_and_entropy(states, weight, batch.targets, temperature))
        return PolicyOutput(*head.from_logits(self.logits(batch), batch.targets, temperature))

    def logits(self, batch: MicroBatch) -> Tensor:
        """[N, vocabulary] logits of the trained tokens, by the form's head, at temperature 1."""
        if self.form.product_head:
            states = self._run(self.model.get_decoder(), batch, "last_hidden_state")
            weight: Tensor = self.model.get_output_embeddings().weight
            return states @ weight.T
        return self._run(self.model, batch, "logits")

    def _run(self, module: Any, batch: MicroBatch, output: str) -> Tensor:
        """[N, width] output of a module at the tokens that predict a trained token."""
        if not self.form.packed:
            return self._run_padded(module, batch, output)
        keep = {"logits_to_keep": batch.predictors} if output == "logits" else {}
        result = module(
            input_ids=batch.tokens, position_ids=batch.positions, use_cache=False, packed=batch.layout, **keep
        )
        values: Tensor = getattr(result, output)[0]
        return values if keep else values.index_select(0, batch.predictors)

    def _run_padded(self, module: Any, batch: MicroBatch, output: str) -> Tensor:
        """The same with padded batches: the whole module, not only attention, runs on the rows of the layout."""
        buckets = batch.layout.buckets
        longest = max(length for _, length in buckets)
        ids, positions = (tensor[0].index_select(0, batch.layout.inputs) for tensor in (batch.tokens, batch.positions))
        inputs: list[tuple[Tensor, Tensor]] = []
        start = 0
        for rows, length in buckets:
            span = slice(start, start := start + rows * length)
            # Padding repeats the first token of its row, whose position is 0.
            mask = positions[span].view(rows, length) == torch.arange(length, device=ids.device)
            pad = (0, longest - length if self._one_bucket else 0)
            inputs.append((functional.pad(ids[span].view(rows, length), pad), functional.pad(mask.long(), pad)))
        if self._one_bucket:
            joined_ids, joined_mask = (torch.cat(tensors) for tensors in zip(*inputs, strict=True))
            joined = _call(module, joined_ids, joined_mask, output)
            outputs = list(torch.split(joined, [rows for rows, _ in buckets]))
        else:
            outputs = [_call(module, padded_ids, mask, output) for padded_ids, mask in inputs]
        flat = torch.cat(
            [values[:, :length].flatten(0, 1) for values, (_, length) in zip(outputs, buckets, strict=True)]
        )
        return flat.index_select(0, batch.layout.outputs.index_select(0, batch.predictors))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def choose_form(model: Any) -> Form:
    """The first form whose log-probs equal those of the plain forward pass; the model is left unchanged.

    If there is none, a `ModelError` names the model and what was wrong with the last form tried.
    """
    failed: list[Exception] = []
    with exactness.failures_as(failed):
        trajectories, prompt = _siblings(model)
        wanted = exactness.reference(model, [trajectory.tokens.tolist() for trajectory in trajectories])
        plain = [rows[prompt - 1 : -1] for rows in wanted]
    if failed:
        raise exactness.refusal(model, "training", "a plain forward pass", failed[0])
    last: ExactnessDifference | Exception = ModelError("there is no form in which it could be trained")
    own = exactness.attention_of(model)
    for form in _forms(model):
        with exactness.failures_as(failed):
            last = _measure(model, form, trajectories, plain)
        exactness.set_attention(model, own)
        if failed:
            last = failed.pop()
        elif isinstance(last, ExactnessDifference) and last.exact:
            return form
    raise exactness.refusal(model, "training", HOW, last)


def sharded_policy(model: Any, form: Form, config: TrainerConfig, rank_group: RankGroup) -> Policy:
    """A policy in this form, sharded over the ranks."""
    policy = Policy(model, config.temperature, form, one_bucket=rank_group.mesh is not None)
    if rank_group.mesh is not None:
        shard(policy, _decoder_layers(model), rank_group, config.precision)
    return policy


def checkpoint_activations(model: Any) -> None:
    """Recompute the activations of layers in the backward pass.

    Layers do this in training mode only, and no other module may be in training mode, so it is set for these layers
    alone, and their own dropout is switched off.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True
            for name in [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]:
                setattr(layer, name, 0.0)


def _decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers, each of which is sharded as a unit."""
    lists: Any = [module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList)]
    if not lists:
        name = type(model).__name__
        raise ModelError(f"{name} can't be trained on several ranks: its decoder has no list of layers")
    largest = max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))
    return list(largest)


def _forms(model: Any) -> list[Form]:
    heads = [True, False] if _product_head(model) else [False]
    own = exactness.attention_of(model)
    packed = [Form(product_head=product) for product in heads]
    return packed + [Form(packed=False, product_head=product, attention=own) for product in heads]


@torch.no_grad()
def _measure(model: Any, form: Form, trajectories: list[Trajectory], wanted: list[Tensor]) -> ExactnessDifference:
    batch = pack(trajectories).to(model.device)
    logprobs = Policy(model, 1.0, form).logits(batch).float().log_softmax(-1)
    return exactness.difference(torch.split(logprobs, [len(rows) for rows in wanted]), wanted, model)


def _siblings(model: Any) -> tuple[list[Trajectory], int]:
    """Trajectories of different lengths with one prompt, and the length of the prompt."""
    limit = model_context(model.config) or max(exactness.LENGTHS)
    sequences = exactness.probe_sequences(model, limit)
    prompt = min(3, min(map(len, sequences)) - 1)
    made = []
    for number, sequence in enumerate(sequences):
        tokens = np.array(sequences[0][:prompt] + sequence[prompt:], dtype=np.int32)
        made.append(
            Trajectory(
                id=number,
                version=0,
                tokens=tokens,
                loss_mask=np.arange(len(tokens)) >= prompt,
                behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
                reward=0.0,
            )
        )
    return made, prompt


def _product_head(model: Any) -> bool:
    output = model.get_output_embeddings()
    config = model.config.get_text_config()
    special = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _HEAD_SETTINGS)
    return type(output) is nn.Linear and output.bias is None and not special


def _call(module: Any, ids: Tensor, mask: Tensor, output: str) -> Tensor:
    values: Tensor = getattr(module(input_ids=ids, attention_mask=mask, use_cache=False), output)
    return values
