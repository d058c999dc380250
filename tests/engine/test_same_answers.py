"""The engine gives the tokens and log-probs of the plain model, whatever is enabled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.engine.requests import Request, Sampling
from dora_rl.engine.sampling import uniform
from tests.engine import tiny
from tests.engine.tiny import Collector, Family

TOKENS = 20
BOTH: tuple[Family, ...] = ("llama", "qwen3_moe")


def greedy(count: int) -> list[Request]:
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0)
    return [
        Request(trajectory=index, version=0, prompt=prompt, sampling=sampling)
        for index, prompt in enumerate(tiny.prompts(count))
    ]


def same(collector: Collector, family: Family, count: int) -> None:
    expected = tiny.greedy_reference(family, 64, TOKENS)[:count]
    assert [collector.responses[index].tokens for index in range(count)] == expected


@pytest.mark.parametrize("count", [1, 7, 64])
@pytest.mark.parametrize(("kernels", "stretch"), [("native", 1), ("native", 16), ("torch", 16)])
@pytest.mark.parametrize("family", BOTH)
def test_greedy_equals_generate(family: Family, kernels: str, stretch: int, count: int) -> None:
    engine = tiny.engine(tiny.model(family), kernels=kernels, stretch=stretch)
    collector = tiny.run(engine, greedy(count))
    same(collector, family, count)
    if count == 64:
        assert engine.stats.shared > 0, "siblings did not share their prompt"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mixtral", "olmoe", "gemma2"])
def test_other_families_equal_generate(family: Family) -> None:
    engine = tiny.engine(tiny.model(family))
    assert engine.kernels == ("generic" if family == "gemma2" else "native")
    expected = tiny.greedy_reference(family, 6, TOKENS)
    collector = tiny.run(engine, greedy(6))
    assert [collector.responses[index].tokens for index in range(6)] == expected


@pytest.mark.parametrize("family", BOTH)
def test_preemption_and_migration_change_no_token(family: Family) -> None:
    made = tiny.model(family)
    small: dict[str, Any] = {"block_size": 4, "kv_bytes": tiny.kv_bytes(made, 36, 4), "prefill_chunk": 7}
    engines = [tiny.engine(made, name=name, **small) for name in "ab"]
    collector = Collector()
    for request in greedy(32):
        engines[0].submit(request)
    random = np.random.default_rng(0)
    moves = 0
    while any(engine.busy for engine in engines):
        for source, target in (engines, engines[::-1]):
            collector.collect(source.step())
            source.check()
            here = list(source.progress().tokens)
            if here and random.random() < 0.5:
                chosen = random.choice(here, size=min(3, len(here)), replace=False).tolist()
                bundle = source.export(chosen, shared=False)
                collector.collect(source.drain())
                arrived, errors = target.import_(bundle, 0)
                assert sorted(arrived) == sorted(chosen)
                assert not errors
                moves += len(chosen)
    same(collector, family, 32)
    assert moves > 20
    assert sum(engine.stats.preempted for engine in engines) > 5
    assert sum(engine.stats.reprefilled for engine in engines) == 0


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", BOTH)
def test_log_probs_equal_a_plain_forward_pass(family: Family, kernels: str) -> None:
    made = tiny.model(family)
    some = tiny.requests(12, temperature=0.7)
    collector = tiny.run(tiny.engine(made, kernels=kernels), some)
    for request in some:
        said = collector.responses[request.trajectory]
        full = torch.tensor([request.prompt + said.tokens])
        with torch.no_grad():
            logits = made(full).logits[0, len(request.prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(said.model_logprobs), expected, atol=1e-4, rtol=0)
        assert torch.allclose(torch.tensor(said.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_each_token_follows_from_seed_trajectory_and_position(kernels: str) -> None:
    made = tiny.model("llama")
    some = tiny.requests(6, first=40)
    collector = tiny.run(tiny.engine(made, kernels=kernels), some)
    for request in some:
        said = collector.responses[request.trajectory].tokens
        with torch.no_grad():
            logits = made(torch.tensor([request.prompt + said])).logits[0, len(request.prompt) - 1 : -1]
        reach = logits.double().softmax(-1).cumsum(-1).numpy()
        place = np.arange(len(said), dtype=np.uint64)
        seed, trajectory = np.full_like(place, request.sampling.seed), np.full_like(place, request.trajectory)
        goal = uniform(seed, trajectory, place)
        assert said == tuple((reach <= goal[:, None]).sum(-1).tolist())


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_routed_experts_are_those_of_the_forward_pass(kernels: str) -> None:
    made = tiny.model("qwen3_moe")
    prompt, sampling = tiny.prompts(1)[0], Sampling(max_tokens=9)
    # The first sibling records no experts; the third shares the prompt of the second.
    siblings = [
        Request(trajectory=i, version=0, prompt=prompt, sampling=sampling, record_experts=i != 2) for i in (2, 0, 1)
    ]
    engine = tiny.engine(made, kernels=kernels, max_requests=1, prefill_chunk=5)
    collector = tiny.run(engine, siblings)
    found = np.concatenate(collector.experts[0])
    seen: list[torch.Tensor] = []
    routers = [module for module in made.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _m, _i, out: seen.append(out[-1])) for router in routers]
    with torch.no_grad():
        made(torch.tensor([prompt + collector.responses[0].tokens]))
    for hook in hooks:
        hook.remove()
    expected = torch.stack(seen, dim=1)[:-1].numpy()
    found = np.concatenate([collector.prompt_experts[0], found])
    assert found.shape == expected.shape
    assert (np.sort(found, -1) == np.sort(expected, -1)).all()
    assert engine.stats.shared == len(prompt) - 1
    assert (collector.prompt_experts[1] == collector.prompt_experts[0]).all()
    assert set(collector.prompt_experts) == {0, 1}
