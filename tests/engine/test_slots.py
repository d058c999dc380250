"""Several versions at once: weights are mapped, loaded during decoding, and the tokens carry their version."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dora_rl.core.activities import WORK, ActivityLabel, IdleCause, IdleReason
from dora_rl.core.errors import SlotError, VersionError
from dora_rl.core.events import Generated, SlotLoaded, SlotLoadFailed
from dora_rl.core.time_accounting import Activity
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.sources import MemoryWeights
from tests.engine import tiny
from tests.engine.tiny import Collector


def two_versions() -> MemoryWeights:
    return MemoryWeights({v: tiny.model("llama", seed=v).state_dict() for v in (0, 1)})


def requests(version: int, first: int) -> list[Request]:
    sampling = Sampling(max_tokens=25)
    return [
        Request(trajectory=first + i, version=version, prompt=prompt, sampling=sampling)
        for i, prompt in enumerate(tiny.prompts(5))
    ]


def decoding_threads(engine: Any) -> set[int]:
    """The ids of the threads that decode for the engine's slots, filled as it runs."""
    seen: set[int] = set()
    for slot in engine.slots:
        decode = slot.runner.decode

        def noted(*given: Any, decode: Any = decode, **named: Any) -> int:
            seen.add(threading.get_ident())
            count: int = decode(*given, **named)
            return count

        slot.runner.decode = noted
    return seen


@pytest.mark.parametrize(("kernels", "threads", "beside"), [("native", 1, 1), ("native", 3, 2), ("torch", 2, 0)])
def test_two_versions_decode_at_once(kernels: str, threads: int, beside: int) -> None:
    """With enough threads both decode in parallel; the tokens do not depend on it."""
    weights = two_versions()
    engine = tiny.engine(
        tiny.model("llama"), weights=weights, versions=(0, 1), kernels=kernels, threads=threads, stretch=1
    )
    seen = decoding_threads(engine) if kernels == "native" else set()
    both = tiny.run(engine, requests(0, 0) + requests(1, 100))
    assert len(seen) == beside
    for version in (0, 1):
        alone = tiny.engine(tiny.model("llama"), weights=weights, versions=(version,), kernels=kernels)
        expected = tiny.run(alone, requests(version, 100 * version)).responses
        assert {key: said for key, said in both.responses.items() if (key >= 100) == version} == expected
    stamps = {(event.version, event.fingerprint) for event in both.events if isinstance(event, Generated)}
    assert stamps == {(version, weights.fingerprint(version)) for version in (0, 1)}
    assert stamps == {(one.version, one.fingerprint) for one in both.finished.values()}


class Mapped:
    """A source over safetensors files, whose loads a test can delay."""

    def __init__(self, folder: Path) -> None:
        self.open = threading.Event()
        self.open.set()
        self._folder = folder
        self.given: dict[int, Mapping[str, Any]] = {}

    def tensors(self, version: int) -> Mapping[str, Any]:
        self.open.wait(timeout=600)
        self.given[version] = load_file(self._folder / f"{version}.safetensors")
        return self.given[version]

    def probe(self, version: int) -> None:
        """Return None: it is published without a probe."""

    def fingerprint(self, version: int) -> str:
        return f"file {version}"


@pytest.fixture
def mapped(tmp_path: Path) -> Mapped:
    for version in (0, 1):
        state = tiny.model("llama", seed=version).state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / f"{version}.safetensors")
    return Mapped(tmp_path)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_weights_are_not_copied(mapped: Mapped, kernels: str) -> None:
    engine = tiny.engine(tiny.model("llama"), weights=mapped, kernels=kernels)
    given = {tensor.data_ptr() for tensor in mapped.given[0].values()}
    runner: Any = engine.slots[0].runner
    if kernels == "native":
        used = {tensor.data_ptr() for tensor in runner._weights.values()}
    else:
        used = {parameter.data_ptr() for parameter in runner._module.parameters()}
    assert used == given


def test_decoding_continues_during_a_load(mapped: Mapped) -> None:
    engine = tiny.engine(tiny.model("llama"), weights=mapped, slots=2)
    for request in requests(0, 0):
        engine.submit(request)
    mapped.open.clear()
    engine.load(1, 1)
    collector = Collector()
    while engine.running or len(collector.finished) < 5:
        collector.collect(engine.step())
    assert not any(isinstance(event, SlotLoaded) and event.version == 1 for event in collector.events)
    assert engine.slots[1].account.by_label().get(ActivityLabel.LOAD, 0) > 0
    mapped.open.set()
    engine.wait_for_loads()
    collector.collect(engine.step())
    assert any(isinstance(event, SlotLoaded) and event.version == 1 for event in collector.events)
    tiny.run(engine, requests(1, 50))


def test_a_missing_version_fails_only_its_load() -> None:
    engine = tiny.engine(tiny.model("llama"), slots=2)
    engine.submit(requests(0, 0)[0])
    engine.load(1, 77)
    collector = Collector().run(engine)
    failed = [event for event in collector.events if isinstance(event, SlotLoadFailed)]
    assert len(failed) == 1
    assert "77" in failed[0].reason
    assert len(collector.finished) == 1, "the other request did not continue"
    with pytest.raises(VersionError, match="77"):
        engine.submit(requests(77, 9)[0])


def test_weights_of_another_shape_are_refused() -> None:
    state = tiny.model("llama").state_dict() | {"model.norm.weight": torch.ones(5)}
    engine = tiny.engine(tiny.model("llama"), weights=MemoryWeights({0: state}))
    events = engine.step().events
    assert [type(event) for event in events] == [SlotLoadFailed]
    assert "model.norm.weight" in events[0].reason  # type: ignore[union-attr]


def test_a_slot_with_requests_is_not_overwritten() -> None:
    engine = tiny.engine(tiny.model("llama"), weights=two_versions())
    engine.submit(requests(0, 0)[0])
    with pytest.raises(SlotError, match="still has requests"):
        engine.load(0, 1)
    with pytest.raises(SlotError, match="no slot 3"):
        engine.load(3, 1)


def test_an_unloaded_slot_releases_its_weights(mapped: Mapped) -> None:
    engine = tiny.engine(tiny.model("llama"), weights=mapped)
    tiny.run(engine, requests(0, 0))
    weight = weakref.ref(mapped.given.pop(0)["model.norm.weight"])
    engine.unload(0)
    gc.collect()
    assert weight() is None
    with pytest.raises(VersionError, match="version 0"):
        engine.submit(requests(0, 0)[0])


def test_in_flight_update_changes_the_version_and_counts_the_recomputation() -> None:
    engine = tiny.engine(tiny.model("llama"), weights=two_versions(), max_requests=3)
    for request in requests(0, 0):
        engine.submit(request)
    collector, versions = Collector(), []
    for _ in range(12):
        collector.collect(output := engine.step())
        versions += [chunk.version for chunk in output.chunks]
    engine.load(0, 1, in_flight=True)
    engine.wait_for_loads()
    while engine.busy:
        collector.collect(output := engine.step())
        versions += [chunk.version for chunk in output.chunks]
        engine.check()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert engine.stats.reprefilled > 0
    assert {one.tokens for one in collector.finished.values()} == {25}


def test_a_prompt_computed_under_other_weights_is_never_found() -> None:
    prompt, sampling = tiny.prompts(1, seed=4, longest=50)[0] * 2, Sampling(max_tokens=9)
    siblings = [Request(trajectory=i, version=0, prompt=prompt, sampling=sampling) for i in range(3)]
    engine = tiny.engine(tiny.model("llama"), weights=two_versions(), max_requests=1, prefill_chunk=128)
    for request in siblings:
        engine.submit(request)
    collector = Collector()
    collector.collect(engine.step())
    scheduler, waiting = engine._scheduler, engine._sequences[2]
    before = scheduler._key(waiting)
    assert scheduler.prompts.blocks(before), "the siblings' prompt is computed and held for those that wait"
    engine.load(0, 1, in_flight=True)
    engine.wait_for_loads()
    after = scheduler._key(waiting)
    assert before != after
    assert not scheduler.prompts.blocks(after)
    assert not scheduler.prompts.blocks(before)
    fresh = tiny.engine(tiny.model("llama"), weights=two_versions(), versions=(1,))
    expected = tiny.run(fresh, [msgspec.structs.replace(siblings[2], version=1)]).responses[2]
    assert collector.run(engine).responses[2] == expected


def test_all_time_has_a_label() -> None:
    ticks = iter(range(0, 10**9, 1000))
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.engine import Engine

    made = tiny.model("llama")
    config = EngineConfig(slots=2, kv_bytes=1 << 22, prefill_chunk=16, stretch=1, threads=1)
    engine = Engine(made, MemoryWeights.of(made), config, clock=lambda: next(ticks))
    engine.load(0, 0)
    engine.wait_for_loads()
    tiny.run(engine, requests(0, 0))
    busy = engine.slots[0].account
    assert busy.by_label()[ActivityLabel.DECODE] > busy.by_label()[ActivityLabel.PREFILL] > 0
    for slot in engine.slots:
        assert sum(slot.account.by_label().values()) == slot.account.lifetime > 0
    assert set(engine.slots[1].account.by_label()) == {ActivityLabel.IDLE}


def test_an_idle_slot_is_spare_while_another_slot_computes() -> None:
    engine = tiny.engine(tiny.model("llama"), weights=two_versions(), versions=(0, 1))
    engine.note_idle(1, IdleCause(reason=IdleReason.TOOL))
    before = engine.slots[1].account.idle_by_cause().get("tool", 0)
    collector = Collector()
    for request in requests(0, 0):
        engine.submit(request, 0)
    collector.run(engine)
    idle, busy = engine.slots[1].account, engine.slots[0].account
    assert idle.idle_by_cause()["spare slot"] > 0
    assert idle.current == Activity(ActivityLabel.IDLE, cause=IdleCause(reason=IdleReason.TOOL))
    worked = sum(busy.by_label().get(label, 0) for label in WORK)
    assert idle.idle_by_cause()["spare slot"] <= worked
    assert before <= idle.idle_by_cause().get("tool", 0) <= idle.lifetime - idle.idle_by_cause()["spare slot"]


def test_a_slot_with_few_requests_takes_many_steps_while_another_prefills() -> None:
    """Slots share time, not steps: requests of an old version are not delayed by those of a new one."""
    engine = tiny.engine(
        tiny.model("llama"), weights=two_versions(), versions=(0, 1), stretch=16, prefill_chunk=4, max_context=128
    )
    engine.submit(Request(trajectory=0, version=1, prompt=(5, 6, 7), sampling=Sampling(max_tokens=60)))
    engine.step()
    engine.submit(Request(trajectory=1, version=0, prompt=tuple(range(3, 43)), sampling=Sampling(max_tokens=5)))
    engine.slots[1].pace = 1
    before = engine.stats.decoded
    engine.step()
    assert engine.slots[0].batch.decoding == 0
    assert engine.stats.decoded - before == 16
    engine.check()


def test_a_replaced_version_is_freed_at_once() -> None:
    """Not at the next garbage collection, which depends on the number of objects, not on their size."""
    engine = tiny.engine(tiny.model("llama"), weights=two_versions())
    former = weakref.ref(engine.slots[0].runner)
    gc.disable()
    try:
        engine.load(0, 1)
        engine.wait_for_loads()
        assert former() is None
    finally:
        gc.enable()
