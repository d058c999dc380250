"""Sampling settings, from the config file through the supervisor's requests to the tokens that an instance generates.

The model is small enough that a plain forward pass gives the expected distribution of each token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dora_rl.core import events as e
from dora_rl.core.types import InstanceSpec, SlotId
from dora_rl.engine.requests import Request, Sampling
from dora_rl.runtime.transport import messages as m
from tests.runtime.making import LETTERS
from tests.settings.workers import InstanceHarness, at, publish, supervisor

END = 1
"""The end-of-text token."""


class Answered(NamedTuple):
    requests: tuple[Request, ...]
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[float]]
    ended: dict[int, str]


def answered(base: Path, *changes: dict[str, Any]) -> Answered:
    """Return the requests of the first group and the responses that an instance generates for them."""
    with supervisor(base, *changes) as harness:
        publish(harness.folder)
        harness.begin()
        submit = harness.submits()[0]
        instance = InstanceHarness(harness.folder)
        tokens = instance.answer(submit)
        return Answered(submit.requests, tokens, instance.logprobs, instance.ended)


@pytest.fixture(scope="module")
def usual(base: Path) -> Answered:
    return answered(base)


def distributions(base: Path, request: Request, tokens: list[int]) -> Any:
    """Return the [T, V] log-probs of each token at temperature 1, computed by a plain forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base / "model")
    ids = torch.tensor([[*request.prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def ranks(distribution: Any, tokens: list[int]) -> list[int]:
    """Return how many tokens were likelier than each sampled token."""
    chosen = distribution.gather(1, torch.tensor(tokens)[:, None])
    return [int(number) for number in (distribution > chosen).sum(1)]


def test_rollout_requests_contain_every_sampling_setting(base: Path) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.05, "stop": ["=1", "+"]}
    control = at("control.max_response_tokens", 33)
    with supervisor(base, {"sampling": sampling, "seed": 9}, control) as harness:
        harness.begin()
        requests = [request for submit in harness.submits() for request in submit.requests]
    assert requests
    wanted = Sampling(
        max_tokens=33, temperature=0.7, top_p=0.8, top_k=5, min_p=0.05, stop=("=1", "+"), stop_ids=(END,), seed=9
    )
    assert all(request.sampling == wanted for request in requests)


def test_evaluation_requests_use_the_evaluation_settings(base: Path) -> None:
    """This covers `evaluation.samples`, `evaluation.temperature` and `data.held_out`.

    The other sampling settings are those of rollout.
    """
    changes = {
        "evaluation": {"every": 1, "samples": 3, "temperature": 0.25},
        "data": {"held_out": 2},
        "sampling": {"top_p": 0.9, "top_k": 4, "min_p": 0.01, "temperature": 0.8},
    }
    with supervisor(base, changes) as harness:
        publish(harness.folder)
        harness.begin()
        supervisor_: Any = harness.run.supervisor
        process = next(one for one in supervisor_._processes.workers if one.worker_id == "evaluator")
        spec = InstanceSpec(instance="evaluator.1", max_requests=4, kv_tokens=1000)
        supervisor_.receive(process, m.RolloutReady(spec=spec, kernels="torch"))
        loaded = e.SlotLoaded(slot=SlotId("evaluator.1", 0), version=0, fingerprint="v0")
        supervisor_.receive(process, m.RolloutReport(events=(loaded,)))
        (submit,) = harness.sent_to("evaluator", m.SubmitRequests)
        held_out = [harness.run.tokenization.encode(problem) for problem in harness.run.dataset.held_out]
        limit = harness.run.config.control.max_response_tokens
    assert [request.prompt for request in submit.requests] == [prompt for prompt in held_out for _ in range(3)]
    wanted = Sampling(max_tokens=limit, temperature=0.25, top_p=0.9, top_k=4, min_p=0.01, stop_ids=(END,), seed=1)
    assert all(request.sampling == wanted for request in submit.requests)
    assert len({request.trajectory for request in submit.requests}) == 6


def test_sampling_is_reproducible_and_depends_on_the_seed(base: Path, usual: Answered) -> None:
    assert answered(base).tokens == usual.tokens
    assert answered(base, at("seed", 2)).tokens != usual.tokens


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda one: next(iter(one)))
def test_keeping_one_token_is_greedy(base: Path, usual: Answered, changes: dict[str, Any]) -> None:
    found = answered(base, {"sampling": changes})
    assert found.tokens != usual.tokens
    for request in found.requests:
        tokens = found.tokens[request.trajectory]
        assert ranks(distributions(base, request, tokens), tokens) == [0] * len(tokens)
    first, second = found.tokens.values()
    assert first == second, "siblings differ although sampling is deterministic"


def test_top_k_keeps_the_k_likeliest_tokens(base: Path, usual: Answered) -> None:
    for limit, found in ((3, answered(base, at("sampling.top_k", 3))), (len(LETTERS) + 2, usual)):
        seen = {
            rank
            for request in found.requests
            for rank in ranks(
                distributions(base, request, found.tokens[request.trajectory]), found.tokens[request.trajectory]
            )
        }
        assert max(seen) < limit
        assert max(seen) == 2 or limit > 3
        assert limit == 3 or max(seen) > 2


def test_top_p_keeps_the_smallest_set_that_reaches_it(base: Path, usual: Answered) -> None:
    def outside(found: Answered) -> list[bool]:
        """Return, for each sampled token, whether the likelier tokens have a total probability of at least 0.6."""
        found_outside = []
        for request in found.requests:
            tokens = found.tokens[request.trajectory]
            table = distributions(base, request, tokens)
            chosen = table.gather(1, torch.tensor(tokens)[:, None])
            found_outside += (torch.where(table > chosen, table.exp(), 0.0).sum(1) >= 0.6 + 1e-4).tolist()
        return found_outside

    assert not any(outside(answered(base, at("sampling.top_p", 0.6))))
    assert any(outside(usual))


def test_min_p_keeps_sufficiently_likely_tokens(base: Path, usual: Answered) -> None:
    def least(found: Answered) -> float:
        """Return the smallest ratio of a sampled token's probability to that of the likeliest token."""
        shares = []
        for request in found.requests:
            tokens = found.tokens[request.trajectory]
            table = distributions(base, request, tokens).exp()
            chosen = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            shares.append(float((chosen / table.max(1).values).min()))
        return min(shares)

    assert least(answered(base, at("sampling.min_p", 0.4))) >= 0.4 - 1e-4
    assert least(usual) < 0.4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_log_probs_include_the_temperature(base: Path, usual: Answered, temperature: float) -> None:
    found = answered(base, at("sampling.temperature", temperature))
    assert found.tokens != usual.tokens
    for request in found.requests:
        tokens = found.tokens[request.trajectory]
        table = (distributions(base, request, tokens) / temperature).log_softmax(-1)
        wanted = table.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found.logprobs[request.trajectory]).double(), wanted, atol=1e-4)


def test_a_response_ends_at_a_stop_string(base: Path, usual: Answered) -> None:
    letter = {number + 2: one for number, one in enumerate(LETTERS)}
    # Any letter generated in the middle of a response ends the response there when it is a stop string.
    longest = max(usual.tokens.values(), key=len)
    stop = next(token for token in longest[1:-1] if token in letter)
    found = answered(base, at("sampling.stop", [letter[stop]]))
    for number, tokens in usual.tokens.items():
        cut = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert found.tokens[number] == cut
        assert found.ended[number] == ("stop" if stop in tokens or tokens[-1] == END else "length")
    assert found.tokens != usual.tokens


def test_no_response_exceeds_the_configured_length(base: Path, usual: Answered) -> None:
    found = answered(base, at("control.max_response_tokens", 7))
    assert found.tokens == {number: tokens[:7] for number, tokens in usual.tokens.items()}
    assert max(map(len, usual.tokens.values())) > 7
