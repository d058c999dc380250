"""The policy as the trainer sees it: packed trajectories in, log-probs and entropies of trained tokens out.

It is one module around the model, so that sharding can treat embeddings, decoder and head as one. The head is
computed for the trained tokens only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dora_rl.models import head, packed
from dora_rl.trainer.packing import MicroBatch

# Settings with which a model's logits are more than hidden states times output embeddings.
_HEAD_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyOutput(NamedTuple):
    """Of the N trained tokens of a micro-batch."""

    logprobs: Tensor
    """[N]"""
    entropy: Tensor
    """[N]"""


class Policy(nn.Module):
    """A causal LM of `transformers` with packed attention."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        model.set_attn_implementation(packed.NAME)
        self.model = model
        self.temperature = temperature

    def forward(self, batch: MicroBatch) -> PolicyOutput:
        inputs = {
            "input_ids": batch.tokens,
            "position_ids": batch.positions,
            "use_cache": False,
            "packed": batch.layout,
        }
        if self._plain_head():
            hidden = self.model.get_decoder()(**inputs).last_hidden_state[0]
            weight = self.model.get_output_embeddings().weight
            states = hidden.index_select(0, batch.predictors)
            return PolicyOutput(*head.logprobs_and_entropy(states, weight, batch.targets, self.temperature))
        logits = self.model(**inputs, logits_to_keep=batch.predictors).logits[0]
        return PolicyOutput(*head.from_logits(logits, batch.targets, self.temperature))

    def _plain_head(self) -> bool:
        output = self.model.get_output_embeddings()
        config = self.model.config.get_text_config()
        special = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _HEAD_SETTINGS)
        return type(output) is nn.Linear and output.bias is None and not special

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
