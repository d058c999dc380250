"""A runner's log-probs of given tokens are those of a plain forward pass, however the tokens are split into passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core import probe
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.kernel_choice import choose_runner
from dora_rl.engine.kv import KvCache, KvShape
from dora_rl.engine.probe import logprobs
from dora_rl.engine.runner import Runner
from dora_rl.models.sources import MemoryWeights
from tests.engine import tiny

LIMIT = 64


def make_runner(model: Any, kernels: str, shape: KvShape) -> Runner:
    cache = KvCache(shape, 2 * shape.block_bytes, model.device)
    way = choose_runner(model, EngineConfig(kernels=kernels), 256)
    return way.make(model, MemoryWeights.of(model).tensors(0), cache, LIMIT, 256)


def plain(model: Any, sequences: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The log-probs from `transformers`, one sequence at a time."""
    found = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            said = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found.append(said.gather(1, ids[0, 1:, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gemma2"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("cut", [{}, {"limit": 3}, {"decoded": 40}, {"decoded": 0}])
def test_log_probs_are_those_of_a_plain_forward_pass(family: Any, kernels: str, cut: dict[str, int]) -> None:
    model = tiny.model(family)
    shape = KvShape.of(model, 16)
    sequences = probe.sequences(0, tiny.VOCAB, 256)
    found = logprobs(make_runner(model, kernels, shape), shape, model.device, sequences, **{"limit": LIMIT, **cut})
    for ours, theirs in zip(found, plain(model, sequences), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_the_cache_that_serves_is_not_touched() -> None:
    model = tiny.model("llama")
    shape = KvShape.of(model, 16)
    for kernels in ("auto", "torch"):
        cache = KvCache(shape, 8 * shape.block_bytes, model.device)
        cache.data.fill_(7.0)
        way = choose_runner(model, EngineConfig(kernels=kernels), 256)
        runner = way.make(model, MemoryWeights.of(model).tensors(0), cache, LIMIT, 256)
        logprobs(runner, shape, model.device, probe.sequences(0, tiny.VOCAB, 256), limit=LIMIT)
        assert bool((cache.data == 7.0).all())
