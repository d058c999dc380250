"""Every block and byte is accounted for, and the caps hold."""

from __future__ import annotations

from typing import Any

import pytest

from dora_rl.core.errors import MemoryCapError
from dora_rl.core.events import KvPressure
from dora_rl.engine.blocks import BlockPool
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.sources import MemoryWeights
from tests.engine import tiny
from tests.engine.tiny import Collector

PROMPT = tuple(range(3, 40))


def group(size: int, version: int = 0, first: int = 0) -> list[Request]:
    sampling = Sampling(max_tokens=30)
    return [Request(trajectory=first + i, version=version, prompt=PROMPT, sampling=sampling) for i in range(size)]


def test_siblings_share_their_prompt() -> None:
    engine = tiny.engine(tiny.model("llama"))
    for request in group(8):
        engine.submit(request)
    engine.step()  # three chunks of 16 tokens for the first of them
    engine.step()
    engine.step()
    engine.step()
    assert engine.stats.prefilled == len(PROMPT)
    assert engine.stats.shared == 7 * (len(PROMPT) - 1)
    # Two whole blocks for all, and a copy of the third for each; one more copy is the held original.
    assert engine.kv_tokens <= (2 + 8 + 1) * 16
    Collector().run(engine)
    assert engine.stats.prefilled == len(PROMPT)
    assert engine.stats.copied_blocks >= 7


def test_late_siblings_share_too() -> None:
    engine = tiny.engine(tiny.model("llama"), max_requests=2)
    collector = tiny.run(engine, group(6))
    assert len(collector.finished) == 6
    assert engine.stats.prefilled == len(PROMPT)


def test_requests_that_arrive_at_a_block_boundary_take_no_block_from_others() -> None:
    """Requests may arrive in any step, also in one where a running request begins a new block."""
    engine = tiny.engine(tiny.model("llama"), max_requests=16, max_context=64)
    collector = Collector()
    engine.submit(Request(trajectory=99, version=0, prompt=PROMPT, sampling=Sampling(max_tokens=60)))
    for number in range(12):
        engine.submit(group(1, first=number)[0])
        for _ in range(2):
            collector.collect(engine.step())
            engine.check()
    collector.run(engine)
    assert len(collector.finished) == 13


def test_no_kv_survives_a_change_of_weights() -> None:
    made, other = tiny.model("llama"), tiny.model("llama", seed=1)
    weights = MemoryWeights({0: made.state_dict(), 1: other.state_dict()})
    engine = tiny.engine(made, weights=weights)
    tiny.run(engine, group(2))
    engine.load(0, 1)
    engine.wait_for_loads()
    changed = tiny.run(engine, group(2, version=1)).responses
    assert engine.stats.prefilled == 2 * len(PROMPT)
    assert changed == tiny.run(tiny.engine(other), group(2)).responses


def test_preempted_requests_return_from_the_host() -> None:
    made = tiny.model("llama")
    small: dict[str, Any] = {"block_size": 4, "kv_bytes": tiny.kv_bytes(made, 36, 4)}
    some = tiny.requests(24, max_tokens=40)
    roomy = tiny.run(tiny.engine(made), some)
    engine = tiny.engine(made, **small)
    tight = tiny.run(engine, some)
    assert tight.responses == roomy.responses
    assert engine.stats.preempted > 3
    assert engine.stats.recomputed == engine.stats.reprefilled == 0
    assert any(isinstance(event, KvPressure) for event in tight.events)


def test_recomputation_only_when_the_host_is_full() -> None:
    made = tiny.model("llama")
    some = tiny.requests(24, max_tokens=40)
    engine = tiny.engine(made, block_size=4, kv_bytes=tiny.kv_bytes(made, 36, 4), host_bytes=0)
    said = tiny.run(engine, some).responses
    assert said == tiny.run(tiny.engine(made), some).responses
    assert engine.stats.recomputed > 0
    assert engine.stats.reprefilled > 0


def test_the_cap_is_hard() -> None:
    made = tiny.model("llama")
    cap = tiny.kv_bytes(made, 7) + 5
    engine = tiny.engine(made, kv_bytes=cap)
    assert engine._cache.data.nbytes <= cap
    assert engine.spec().kv_tokens == 7 * 16


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_cap_below_two_blocks_is_refused(blocks: int) -> None:
    made = tiny.model("llama")
    with pytest.raises(MemoryCapError, match="kv_bytes"):
        tiny.engine(made, kv_bytes=tiny.kv_bytes(made, blocks) + 1)


def test_aborted_requests_free_their_blocks() -> None:
    engine = tiny.engine(tiny.model("llama"), max_requests=3)
    for request in group(6):
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert not engine.abort(0, attempt=1), "another attempt was aborted"
    assert all(engine.abort(index, attempt=0) for index in range(6))
    engine.check()
    assert engine.kv_tokens == 0


def test_the_pool_detects_misuse() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.share([block])
    pool.release([block, block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="can't be shared"):
        pool.share([block])


def test_a_request_that_others_join_takes_no_more_blocks_than_its_tokens() -> None:
    """Arrivals at every step, also where a block begins, and a response that fills the context."""
    engine = tiny.engine(tiny.model("llama"), max_context=48, stream_every=16)
    collector = Collector()
    for arrival in range(40):
        sampling = Sampling(max_tokens=48 if arrival == 0 else 1)
        engine.submit(Request(trajectory=arrival, version=0, prompt=(3 + arrival, 4), sampling=sampling))
        collector.collect(engine.step())
    collector.run(engine)
    assert collector.finished[0].tokens == 46
