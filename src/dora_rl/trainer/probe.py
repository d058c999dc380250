"""The trainer's side of the probe: its log-probs of fixed token sequences, from its own packed forward pass.

Invariants:
- the log-probs are computed with the current weights, in the trainer's precision, without dropout, at temperature 1;
- an open step is not changed: no gradient is computed, and the routers replay nothing until their next `begin`;
- all ranks of a sharded trainer compute the probe together and get the same result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dora_rl.core.probe import Probe, sequences, tolerance_of
from dora_rl.core.trajectory import Trajectory
from dora_rl.models.text import model_context
from dora_rl.trainer.moe import Routers
from dora_rl.trainer.packing import MicroBatch, pack
from dora_rl.trainer.policy import Policy

_UNBOUNDED = 1 << 30
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class TrainerProbe:
    """The probe of one run, over one model."""

    def __init__(self, model: Any, seed: int) -> None:
        config = model.config.get_text_config()
        vocabulary = min(config.vocab_size, model.get_input_embeddings().weight.shape[0])
        context = model_context(model.config) or _UNBOUNDED
        self._sequences = sequences(seed, vocabulary, context)
        self._dtype = str(model.dtype).removeprefix("torch.")
        self._sparse = any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)

    @torch.no_grad()
    def compute(self, policy: Policy, routers: Routers, precision: str) -> Probe:
        """The probe with the log-probs of the current policy."""
        batch = pack([_trajectory(index, tokens) for index, tokens in enumerate(self._sequences)]).to(policy.device)
        routers.begin(None)
        logprobs = policy(batch, 1.0).logprobs
        dtype = "bfloat16" if precision == "bfloat16" else self._dtype
        lengths = batch.lengths.tolist()
        return Probe(
            tokens=self._sequences,
            logprobs=tuple(tuple(values.tolist()) for values in torch.split(logprobs.float().cpu(), lengths)),
            firm=self._firm(routers, batch, lengths, tolerance_of(dtype)),
            dtype=dtype,
        )

    def _firm(self, routers: Routers, batch: MicroBatch, lengths: list[int], tie: float) -> tuple[int, ...]:
        """The number of leading log-probs of each sequence that come before the first near tie of experts."""
        margins = routers.margins()
        if margins is None:
            return tuple(0 if self._sparse else length for length in lengths)
        tied = (margins < tie)[batch.predictors].cpu()
        return tuple(int(ties.int().argmax()) if ties.any() else len(ties) for ties in torch.split(tied, lengths))


def _trajectory(index: int, tokens: tuple[int, ...]) -> Trajectory:
    trained = np.ones(len(tokens), dtype=np.bool_)
    trained[0] = False
    return Trajectory(
        id=index,
        version=0,
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=trained,
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        reward=0.0,
    )
