"""Requests of several turns: they park with their KV and resume, as if there had been one long request."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from dora_rl.core.errors import PromptError, RequestError
from dora_rl.core.events import Generated, Parked
from dora_rl.engine.engine import Engine
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.requests import Request, Sampling
from tests.engine import tiny
from tests.engine.tiny import Collector

PROMPT = tuple(range(3, 25))
SAID = (7, 8, 9, 10, 11)


def stops() -> tuple[int, ...]:
    """Token ids that the model samples now and then."""
    return tuple(range(0, tiny.VOCAB, 4))


def request(**changes: object) -> Request:
    sampling = Sampling(max_tokens=80, stop_ids=stops())
    return Request(trajectory=5, version=0, prompt=PROMPT, sampling=sampling, parks=True, **changes)  # type: ignore[arg-type]


def first_turn(engine: Engine, collector: Collector) -> None:
    engine.submit(request())
    collector.run(engine)
    assert isinstance(collector.events[-1], Parked)
    assert engine.has(5, 0)


@pytest.mark.parametrize("moved", [False, True])
def test_a_turn_prefills_only_the_tokens_of_the_environment(moved: bool) -> None:
    engine, collector = tiny.engine(tiny.model("llama")), Collector()
    first_turn(engine, collector)
    before = engine.stats.prefilled
    if moved:
        other = tiny.engine(tiny.model("llama"), name="b")
        other.import_(KvBundle.from_bytes(engine.export([5], shared=False).to_bytes()), 0)
        engine.check()
        engine, before = other, 0
    spoken = collector.responses.pop(5).tokens
    engine.extend(5, 0, SAID)
    collector.finished.clear()
    later = Collector()
    while engine.busy:
        output = engine.step()
        for chunk in output.chunks:
            assert chunk.start >= len(spoken) + len(SAID)
            later.responses[5] = later.responses.get(5, tiny.Response((), (), ())).joined(chunk)
        engine.check()
    # The stop token that ended the turn was sampled and never computed; it is prefilled with the environment's tokens.
    assert engine.stats.prefilled - before == len(SAID) + 1
    assert engine.stats.reprefilled == 0
    again = tiny.engine(tiny.model("llama"))
    again.submit(request(response=spoken + SAID))
    whole = Collector()
    while again.busy:
        for chunk in again.step().chunks:
            whole.responses[5] = whole.responses.get(5, tiny.Response((), (), ())).joined(chunk)
    assert later.responses[5].tokens == whole.responses[5].tokens


def test_the_last_turn_is_reported_as_generated_with_its_stamp() -> None:
    engine, collector = tiny.engine(tiny.model("llama")), Collector()
    first_turn(engine, collector)
    engine.end(5, 0)
    (event,) = engine.drain().events
    assert isinstance(event, Generated)
    assert event.tokens == len(collector.responses[5].tokens)
    assert event.fingerprint
    engine.check()


def test_an_impossible_extension_is_refused_and_affects_no_other() -> None:
    engine, collector = tiny.engine(tiny.model("llama")), Collector()
    first_turn(engine, collector)
    with pytest.raises(PromptError, match="allowed"):
        engine.extend(5, 0, [7] * 100)
    with pytest.raises(PromptError, match="unknown"):
        engine.extend(5, 0, [tiny.VOCAB])
    with pytest.raises(RequestError, match="not parked"):
        engine.extend(5, 1, SAID)
    engine.abort(5, 0)
    engine.check()


def test_a_parked_request_keeps_its_blocks_until_others_need_them() -> None:
    engine, collector = tiny.engine(tiny.model("llama"), host_bytes=0), Collector()
    first_turn(engine, collector)
    scheduler = engine._scheduler
    assert scheduler.pool.free < scheduler.pool.count
    assert engine.kv_tokens == 0, "resting requests must not count as load"
    engine.extend(5, 0, SAID)
    while engine.busy:
        engine.step()
    assert engine.stats.reprefilled == engine.stats.recomputed == scheduler.host_used == 0


@pytest.mark.parametrize("host_bytes", [0, 1 << 24])
def test_running_requests_take_the_blocks_of_resting_ones(host_bytes: int) -> None:
    made = tiny.model("llama")
    engine = tiny.engine(made, kv_bytes=tiny.kv_bytes(made, 8), host_bytes=host_bytes)
    collector = Collector()
    first_turn(engine, collector)
    engine.submit(Request(trajectory=6, version=0, prompt=PROMPT[::-1], sampling=Sampling(max_tokens=106)))
    collector.run(engine)
    engine.check()
    assert collector.finished[6].tokens == 106
    assert engine.stats.preempted == 0
    assert engine._scheduler.host_used == (tiny.kv_bytes(made, 2) if host_bytes else 0)
    engine.extend(5, 0, SAID)
    while engine.busy:
        engine.step()
    assert engine.stats.recomputed == (0 if host_bytes else 1)
    assert (engine.stats.reprefilled == 0) == bool(host_bytes)


def several_turns(random: Random, count: int = 8, turns: int = 3, **config: Any) -> dict[int, tuple[int, ...]]:
    """The tokens of requests whose environments answer in random order, each after a while."""
    engine = tiny.engine(tiny.model("llama"), **config)
    said: dict[int, tuple[int, ...]] = {}
    left = dict.fromkeys(range(count), turns)
    parked: list[int] = []
    coming = list(left)
    while left:
        if coming and random.random() < 0.5:
            number = coming.pop()
            sampling = Sampling(max_tokens=120, stop_ids=stops())
            prompt = PROMPT[: 3 + number // 2]  # two siblings each
            engine.submit(Request(trajectory=number, version=0, prompt=prompt, sampling=sampling, parks=True))
        if parked and random.random() < 0.3:
            number = parked.pop(random.randrange(len(parked)))
            left[number] -= 1
            if left[number]:
                engine.extend(number, 0, [3 + number, *SAID])
            else:
                engine.end(number, 0)
        output = engine.step()
        engine.check()
        for chunk in output.chunks:
            said[chunk.trajectory] = said.get(chunk.trajectory, ()) + tuple(chunk.tokens.tolist())
        for event in output.events:
            if isinstance(event, Parked):
                parked.append(event.trajectory)
            elif isinstance(event, Generated):
                del left[event.trajectory]
    return said


@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_do_not_depend_on_what_happens_to_parked_kv(seed: int) -> None:
    random = Random(seed)
    made = tiny.model("llama")
    said = several_turns(
        random,
        max_requests=random.randint(1, 8),
        kv_bytes=tiny.kv_bytes(made, random.randint(9, 24)),
        host_bytes=random.choice([0, 1 << 14, 1 << 24]),
        prefill_chunk=random.randint(1, 40),
        stretch=random.choice([1, 3, 16]),
    )
    assert said == several_turns(Random(0))


class Letters:
    """A tokenizer in which each token is one character."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x100 + token) for token in tokens)


def turn(engine: Engine, steps: int | None = None) -> tuple[int, ...]:
    """The tokens of the request until its turn ends, or of so many steps."""
    found: tuple[int, ...] = ()
    while engine.busy and (steps is None or steps > 0):
        steps = None if steps is None else steps - 1
        for chunk in engine.step().chunks:
            found += tuple(chunk.tokens.tolist())
    return found


def turns(how: str, sampling: Sampling) -> list[tuple[int, ...]]:
    """Three turns: on one engine, with a move or with a fresh start in the middle of the third."""

    def make() -> Engine:
        engine = tiny.engine(tiny.model("llama"), stream_every=1)
        engine._tokenizer = Letters()
        return engine

    engine = make()
    made = Request(trajectory=5, version=0, prompt=PROMPT, sampling=sampling, parks=True)
    engine.submit(made)
    said = [turn(engine)]
    for _ in range(2):
        engine.extend(5, 0, SAID)
        said.append(turn(engine, steps=4 if len(said) == 2 and how != "stays" else None))
    if how == "moves":
        bundle = engine.export([5], shared=False)
        said[-1] += tuple(token for chunk in engine.drain().chunks for token in chunk.tokens.tolist())
        engine = make()
        engine.import_(KvBundle.from_bytes(bundle.to_bytes()), 0)
        said[-1] += turn(engine)
    elif how == "starts again":
        before = (*said[0], *SAID, *said[1], *SAID)
        again = replace(made, attempt=1, response=(*before, *said[-1]), turn_start=len(before))
        engine = make()
        engine.submit(again)
        said[-1] += turn(engine)
    return said


@pytest.mark.parametrize("how", ["stays", "moves", "starts again"])
def test_a_stop_string_before_a_turn_does_not_end_it(how: str) -> None:
    """Neither that of the turn before nor one in what the environment said: stop strings end turns as stop ids do."""
    ids = (*stops()[::3], SAID[-1])
    letters = tuple(Letters().decode([one]) for one in ids)
    wanted = turns("stays", Sampling(max_tokens=150, seed=3, stop_ids=ids))
    assert [len(one) > 4 for one in wanted[1:]] == [True, True]
    assert turns(how, Sampling(max_tokens=150, seed=3, stop=letters)) == wanted
