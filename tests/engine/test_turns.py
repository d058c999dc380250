"""Requests of several turns: parked with their KV, then on, as if there had been one long request."""

from __future__ import annotations

import pytest

from dora_rl.core.errors import PromptError, RequestError
from dora_rl.core.events import Generated, Parked
from dora_rl.engine.bundle import Bundle
from dora_rl.engine.engine import Engine
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
        other.import_(Bundle.from_bytes(engine.export([5], shared=False).to_bytes()), 0)
        engine.check()
        engine, before = other, 0
    spoken = listener.said.pop(5).tokens
    engine.extend(5, 0, SAID)
    listener.finished.clear()
    later = Listener()
    while engine.busy:
        output = engine.step()
        for part in output.tokens:
            assert part.start >= len(spoken) + len(SAID)
            later.said[5] = tiny.Said(
                later.said.get(5, tiny.Said((), (), ())).tokens + part.tokens, part.logprobs, part.model_logprobs
            )
        engine.check()
    # The stop token that ended the turn was sampled and never computed; it comes with the environment's words.
    assert engine.stats.prefilled - before == len(SAID) + 1
    assert engine.stats.reprefilled == 0
    again = tiny.engine(tiny.model("llama"))
    again.submit(request(response=spoken + SAID))
    whole = Listener()
    while again.busy:
        for part in again.step().tokens:
            whole.said[5] = tiny.Said(
                whole.said.get(5, tiny.Said((), (), ())).tokens + part.tokens, part.logprobs, part.model_logprobs
            )
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
