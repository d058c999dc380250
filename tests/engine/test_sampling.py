"""Samples follow the distribution whose log-probs are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.engine.requests import Sampling
from dora_rl.engine.sampling import Drawn, Settings, draw, uniform

VOCAB = 48
BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, VOCAB).mul(2).repeat(rows, 1)


def sample(given: torch.Tensor, sampling: Sampling, native: bool, first: int = 0) -> Drawn:
    rows = len(given)
    settings = Settings(rows)
    for row in range(rows):
        settings.put(row, sampling, first + row)
    return draw(given, settings, np.arange(rows, dtype=np.uint64), 1, native)


def kept(given: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The expected probabilities, from the logits processors of `transformers`."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    biased = given.clone()
    for token, bias in sampling.logit_bias.items():
        biased[:, token] += bias
    steps: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    ids: Any = torch.zeros(len(given), 1, dtype=torch.long)
    scores: Any = biased
    return LogitsProcessorList(steps)(ids, scores).softmax(-1)


WAYS = [
    Sampling(),
    Sampling(temperature=0.5, seed=3),
    Sampling(top_k=6),
    Sampling(top_p=0.7),
    Sampling(min_p=0.08),
    Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, seed=9),
    Sampling(logit_bias={1: 3.0, 2: -float("inf")}, top_p=0.95),
]


def test_philox_gives_the_published_numbers() -> None:
    # Known answers of Philox4x32-10 for counter and key of all zeros and of all ones, first two words.
    ones = 2**64 - 1
    keys = (np.array([0, ones], dtype=np.uint64),) * 3
    words = [(0x6627E8D5 << 32 | 0xE169C58D), (0x408F276D << 32 | 0x41C83B0E)]
    assert uniform(*keys).tolist() == [(word >> 11) * 2.0**-53 for word in words]


@BOTH
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_draws_follow_the_distribution(native: bool, way: int) -> None:
    """Chi-squared over 20,000 draws; chance exceeds the bound once in a million."""
    sampling, count = WAYS[way], 20_000
    given = logits(count)
    expected = kept(given[:1], sampling)[0].double().numpy() * count
    found = np.bincount(sample(given, sampling, native).token, minlength=VOCAB)
    assert (found[expected == 0] == 0).all(), "a truncated token was drawn"
    rare = expected < 5
    pairs = [(found[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() > 5:
        pairs.append((found[rare].sum(), expected[rare].sum()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    freedom = max(len(pairs) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 25


@BOTH
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_log_probs_are_those_of_both_distributions(native: bool, way: int) -> None:
    sampling, given = WAYS[way], logits(200)
    drawn = sample(given, sampling, native)
    token = torch.from_numpy(drawn.token)[:, None]
    truncated = kept(given, sampling).gather(1, token)[:, 0].log()
    model = (given / sampling.temperature).log_softmax(-1).gather(1, token)[:, 0]
    assert np.allclose(drawn.logprob, truncated, atol=1e-5)
    assert np.allclose(drawn.model_logprob, model, atol=1e-5)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_both_samplers_draw_the_same_tokens(way: int) -> None:
    torch.manual_seed(1)
    given = torch.randn(500, 333) * 3
    assert (sample(given, WAYS[way], True).token == sample(given, WAYS[way], False).token).all()


@BOTH
def test_greedy_takes_the_likeliest(native: bool) -> None:
    torch.manual_seed(1)
    given = torch.randn(50, VOCAB)
    drawn = sample(given, Sampling(temperature=0.0, top_k=3), native)
    assert (drawn.token == given.argmax(-1).numpy()).all()
    assert (drawn.logprob == 0).all()


@BOTH
def test_logits_that_are_not_finite_give_no_token(native: bool) -> None:
    given = logits(3)
    given[1, 5] = float("nan")
    tokens = sample(given, Sampling(), native).token
    assert tokens[1] == -1
    assert (tokens[[0, 2]] >= 0).all()
