"""Requests of several turns: parked with their KV, then on, as if there had been one long request."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from dora_rl.core.errors import PromptError, RequestError
from dora_rl.core.events import Generated, Parked
from dora_rl.engine.engine import Engine
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.requests import Request, Sampling
from tests.engine import tiny
from tests.engine.tiny import Listener

PROMPT = tuple(range(3, 25))
SAID = (7, 8, 9, 10, 11)


def stops() -> tuple[int, ...]:
    """Ids that the model says now and then."""
    return tuple(range(0, tiny.VOCAB, 4))


def request(**changes: object) -> Request:
    sampling = Sampling(max_tokens=80, stop_ids=stops())
    return Request(trajectory=5, version=0, prompt=PROMPT, sampling=sampling, parks=True, **changes)  # type: ignore[arg-type]


def first_turn(engine: Engine, listener: Listener) -> None:
    engine.submit(request())
    listener.run(engine)
    assert isinstance(listener.events[-1], Parked)
    assert engine.has(5, 0)


@pytest.mark.parametrize("moved", [False, True])
def test_a_turn_costs_only_what_the_environment_said(moved: bool) -> None:
    engine, listener = tiny.engine(tiny.model("llama")), Listener()
    first_turn(engine, listener)
    before = engine.stats.prefilled
    if moved:
        other = tiny.engine(tiny.model("llama"), name="b")
        other.import_(KvBundle.from_bytes(engine.export([5], shared=False).to_bytes()), 0)
        engine.check()
        engine, before = other, 0
    spoken = listener.said.pop(5).tokens
    engine.extend(5, 0, SAID)
    listener.finished.clear()
    later = Listener()
    while engine.busy:
        output = engine.step()
        for chunk in output.chunks:
            assert chunk.start >= len(spoken) + len(SAID)
            later.said[5] = later.said.get(5, tiny.Said((), (), ())).joined(chunk)
        engine.check()
    # The stop token that ended the turn was sampled and never computed; it comes with the environment's words.
    assert engine.stats.prefilled - before == len(SAID) + 1
    assert engine.stats.reprefilled == 0
    again = tiny.engine(tiny.model("llama"))
    again.submit(request(response=spoken + SAID))
    whole = Listener()
    while again.busy:
        for chunk in again.step().chunks:
            whole.said[5] = whole.said.get(5, tiny.Said((), (), ())).joined(chunk)
    assert later.said[5].tokens == whole.said[5].tokens


def test_the_last_turn_is_reported_as_generated_with_its_stamp() -> None:
    engine, listener = tiny.engine(tiny.model("llama")), Listener()
    first_turn(engine, listener)
    engine.end(5, 0)
    (event,) = engine.drain().events
    assert isinstance(event, Generated)
    assert event.tokens == len(listener.said[5].tokens)
    assert event.fingerprint
    engine.check()


def test_what_can_not_go_on_is_refused_alone() -> None:
    engine, listener = tiny.engine(tiny.model("llama")), Listener()
    first_turn(engine, listener)
    with pytest.raises(PromptError, match="allowed"):
        engine.extend(5, 0, [7] * 100)
    with pytest.raises(PromptError, match="unknown"):
        engine.extend(5, 0, [tiny.VOCAB])
    with pytest.raises(RequestError, match="not parked"):
        engine.extend(5, 1, SAID)
    engine.abort(5, 0)
    engine.check()


def test_a_parked_request_keeps_its_blocks_while_nobody_needs_them() -> None:
    engine, listener = tiny.engine(tiny.model("llama"), host_bytes=0), Listener()
    first_turn(engine, listener)
    scheduler = engine._scheduler
    assert scheduler.pool.free < scheduler.pool.count
    assert engine.kv_tokens == 0, "what rests counts as load, so that nobody is admitted in its place"
    engine.extend(5, 0, SAID)
    while engine.busy:
        engine.step()
    assert engine.stats.reprefilled == engine.stats.recomputed == scheduler.host_used == 0


@pytest.mark.parametrize("host_bytes", [0, 1 << 24])
def test_what_rests_makes_way_for_what_runs(host_bytes: int) -> None:
    made = tiny.model("llama")
    engine = tiny.engine(made, kv_bytes=tiny.kv_bytes(made, 8), host_bytes=host_bytes)
    listener = Listener()
    first_turn(engine, listener)
    engine.submit(Request(trajectory=6, version=0, prompt=PROMPT[::-1], sampling=Sampling(max_tokens=106)))
    listener.run(engine)
    engine.check()
    assert listener.finished[6].tokens == 106
    assert engine.stats.preempted == 0
    assert engine._scheduler.host_used == (tiny.kv_bytes(made, 2) if host_bytes else 0)
    engine.extend(5, 0, SAID)
    while engine.busy:
        engine.step()
    assert engine.stats.recomputed == (0 if host_bytes else 1)
    assert (engine.stats.reprefilled == 0) == bool(host_bytes)


def several_turns(random: Random, count: int = 8, turns: int = 3, **config: Any) -> dict[int, tuple[int, ...]]:
    """What requests say that are answered in any order, each after a while."""
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
def test_whatever_becomes_of_parked_kv_the_same_is_said(seed: int) -> None:
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
