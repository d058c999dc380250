"""The tokens and log-probs of a request do not depend on when, where and in which batch it runs, to the last bit."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import msgspec
import pytest

from dora_rl.engine.cpu_kernels import runner
from dora_rl.engine.cpu_kernels.runner import CpuKernelRunner
from dora_rl.engine.requests import Request, Sampling
from tests.engine import tiny
from tests.engine.tiny import Collector, Family, Response

COUNT = 10


def some_requests() -> list[Request]:
    """Mixed requests: all sampling settings, ragged prompts and lengths."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.1, "temperature": 1.4},
        {"logit_bias": {5: 2.0, 9: -float("inf")}, "stop_ids": (7, 8, 12, 13, 14)},
    ]
    return [
        Request(
            trajectory=1000 + index,
            version=0,
            prompt=prompt,
            sampling=Sampling(max_tokens=3 + 5 * index % 23, seed=5, **ways[index % len(ways)]),
        )
        for index, prompt in enumerate(tiny.prompts(COUNT, seed=3, longest=40))
    ]


@functools.cache
def alone(family: Family, kernels: str) -> dict[int, Response]:
    """The tokens when each request runs alone, one after the other."""
    said: dict[int, Response] = {}
    for request in some_requests():
        engine = tiny.engine(tiny.model(family), max_requests=1, kernels=kernels)
        said |= tiny.run(engine, [request]).responses
    return said


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_any_schedule_gives_the_same_tokens(family: Family, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone(family, "native")
    monkeypatch.setattr(runner, "cache_budget", lambda _library: seed % 2 << 20)  # a small model, or not
    assert _some_schedule(family, "native", Random(seed)) == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_any_schedule_gives_the_same_tokens_in_torch_up_to_rounding(family: Family, seed: int) -> None:
    said, expected = _some_schedule(family, "torch", Random(100 + seed)), alone(family, "torch")
    assert {key: one.tokens for key, one in said.items()} == {key: one.tokens for key, one in expected.items()}
    for key, one in expected.items():
        assert one.logprobs == pytest.approx(said[key].logprobs, abs=1e-4)
        assert one.model_logprobs == pytest.approx(said[key].model_logprobs, abs=1e-4)


def _some_schedule(family: Family, kernels: str, random: Random) -> dict[int, Response]:
    """The tokens when requests arrive, run, are pre-empted and move at random."""
    made = tiny.model(family)
    engines = [
        tiny.engine(
            made,
            name=f"e{index}",
            max_requests=random.randint(1, COUNT),
            prefill_chunk=random.randint(1, 40),
            stream_every=random.randint(1, 9),
            stretch=random.choice([1, 3, 16]),
            kv_bytes=tiny.kv_bytes(made, random.randint(6, 20)),
            host_bytes=random.choice([0, 1 << 14, 1 << 24]),
            threads=random.randint(1, 2),
            kernels=kernels,
        )
        for index in range(random.randint(1, 3))
    ]
    coming = some_requests()
    random.shuffle(coming)
    collector = Collector()
    while coming or any(engine.busy for engine in engines):
        if coming and random.random() < 0.5:
            random.choice(engines).submit(coming.pop())
        source = random.choice(engines)
        here = sorted(source.progress().tokens)
        if here and len(engines) > 1 and random.random() < 0.3:
            target = random.choice([engine for engine in engines if engine is not source])
            _move(source, target, random.choice(here), random.randrange(3), collector)
        for engine in engines:
            collector.collect(engine.step())
            engine.check()
    return collector.responses


def _move(source: Any, target: Any, trajectory: int, way: int, collector: Collector) -> None:
    """Move by shared memory, as bytes, or with the bundle lost and only the tokens left."""
    request = next(one for one in some_requests() if one.trajectory == trajectory)
    bundle = source.export([trajectory], shared=way == 0)
    collector.collect(source.drain())
    if way == 2:
        bundle.release()
        told = collector.responses.get(trajectory, Response((), (), ())).tokens
        target.submit(msgspec.structs.replace(request, response=told))
        return
    if way == 1:
        bundle = type(bundle).from_bytes(bundle.to_bytes())
    arrived, errors = target.import_(bundle, 0)
    assert arrived == (trajectory,)
    assert not errors


def test_a_stretch_is_several_steps() -> None:
    """The equivalence above means nothing if no engine ever takes more than one step in a call."""
    engine = tiny.engine(tiny.model("llama"), stretch=16)
    engine.slots[0].pace = 1
    sampling = Sampling(max_tokens=20, seed=3)
    engine.submit(Request(trajectory=0, version=0, prompt=(5, 6, 7), sampling=sampling))
    before = []
    while engine.busy:
        engine.step()
        before.append(engine.stats.decoded)
        engine.check()
        engine.slots[0].pace = 1
    assert before == [17, 20], "the first stretch follows the prompt at once"


def some_siblings() -> list[Request]:
    """Groups that share prompts, which end inside a block or at its end; many sample a stop id soon, some at once."""
    return [
        Request(
            trajectory=4 * group + sibling,
            version=0,
            prompt=prompt,
            sampling=Sampling(max_tokens=1 + 7 * sibling * group % 30, seed=9, stop_ids=(3, 7, 8, 12)),
        )
        for group, prompt in enumerate([*tiny.prompts(5, seed=4, longest=30), tuple(range(2, 18))])
        for sibling in range(4)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_follow_a_prompt_and_groups_of_rows_change_nothing(seed: int) -> None:
    expected: dict[int, Response] = {}
    for request in some_siblings():
        expected |= tiny.run(tiny.engine(tiny.model("llama"), max_requests=1, stretch=1), [request]).responses
    random = Random(seed)
    made = tiny.model("llama")
    engine = tiny.engine(
        made,
        max_requests=random.randint(2, 24),
        prefill_chunk=random.randint(4, 60),
        stretch=random.randint(2, 16),
        kv_bytes=tiny.kv_bytes(made, random.choice([8, 20, 80])),
        threads=random.randint(1, 2),
    )
    native = engine.slots[0].runner
    assert isinstance(native, CpuKernelRunner)
    native._cache_budget = random.choice([1, 3000, 1 << 20])
    coming = some_siblings()
    if seed % 2:
        random.shuffle(coming)
    collector = Collector()
    while coming or engine.busy:
        for _ in range(random.randint(0, 4)):
            if coming:
                engine.submit(coming.pop())
        engine.slots[0].pace = random.choice([1, 1, 1 << 40])
        collector.collect(engine.step())
        engine.check()
    assert collector.responses == expected


def test_rows_take_turns_and_none_starves() -> None:
    """If there is time for only one row, it is the one that waited longest; a new request is served at once."""
    engine = tiny.engine(tiny.model("llama"), stretch=4, max_requests=8, max_context=200)

    def served() -> set[int]:
        before = engine.progress().tokens
        engine.slots[0].pace = 1 << 40
        engine.step()
        after = engine.progress().tokens
        return {number for number in after if after[number] != before.get(number, 0)}

    for number in range(5):
        engine.submit(Request(trajectory=number, version=0, prompt=(5, 6, 7), sampling=Sampling(max_tokens=150)))
    while engine.slots[0].batch.decoding < 5:
        served()
    for _ in range(3):
        assert sorted(number for _ in range(5) for number in served()) == [0, 1, 2, 3, 4]
    engine.submit(Request(trajectory=5, version=0, prompt=(8, 9), sampling=Sampling(max_tokens=150)))
    assert served() == {5}
    assert sorted(number for _ in range(5) for number in served()) == [0, 1, 2, 3, 4]
