"""The vLLM engine with a fake in place of vLLM: what is submitted, reported and counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.errors import IntegrityError, RequestError, SlotError, VersionError
from dora_rl.core.events import Generated, KvPressure, Parked, SlotLoaded, SlotLoadFailed, TrajectoryFailed
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.requests import FinishReason, Request, Sampling, StepOutput
from dora_rl.engine.vllm.core import Counters, Output
from dora_rl.engine.vllm.engine import VllmEngine

PROMPT = (1, 2, 3, 4)


class Script:
    """A fake of `Core`: every request samples 10, 11, 12 ... with falling log-probs, until a stop id or its length."""

    version, context, vocab, kv_tokens, block_size = "0.32.0", 64, 50, 1024, 16

    def __init__(self) -> None:
        self.counters = Counters()
        self.transit = None
        self.requests: dict[str, tuple[list[int], int, Sampling, Any]] = {}
        self.stamp: str | None = None
        self.cached = 0
        self.broken = False

    def add(self, name: str, tokens: list[int], most: int, sampling: Sampling, adapter: Any) -> str:
        self.requests[name] = (list(tokens), most, sampling, adapter)
        return name

    def abort(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def step(self) -> list[Output]:
        outputs = []
        for name, (tokens, most, sampling, adapter) in list(self.requests.items()):
            token = tokens[-1] + 1 if tokens[-1] >= 10 else 10
            reason = "stop" if token in sampling.stop_ids else "length" if most == 1 else None
            self.requests[name] = ([*tokens, token], most - 1, sampling, adapter)
            if reason is not None:
                del self.requests[name]
            logprob = math.nan if self.broken else -token / 100
            outputs.append(Output(name, [token], [logprob], self.cached, reason, frozenset({self.stamp or adapter})))
        return outputs


class FakeServing:
    """A fake of `Serving`: the adapter of a version is its name."""

    slots = 3

    def __init__(self) -> None:
        self.served: dict[int, int] = {}

    def load(self, slot: int, version: int) -> str:
        if version == 13:
            raise VersionError("version 13 is not there")
        self.served[slot] = version
        return f"print of {version}"

    def unload(self, slot: int) -> None:
        self.served.pop(slot, None)

    def probe(self, slot: int) -> None:
        """Return None: versions are published without a probe."""

    def adapter(self, slot: int) -> Any:
        return f"v{self.served[slot]}"


class Clock:
    now = 0

    def __call__(self) -> int:
        self.now += 10
        return self.now


def engine(**settings: Any) -> tuple[VllmEngine, Script]:
    script = Script()
    made = VllmEngine(script, FakeServing(), EngineConfig(stream_every=4, **settings), clock=Clock())  # type: ignore[arg-type]
    for slot, version in enumerate((5, 6)):
        made.load(slot, version)
    loaded = made.step().events
    assert [event.fingerprint for event in loaded if isinstance(event, SlotLoaded)] == ["print of 5", "print of 6"]
    return made, script


def request(trajectory: int, version: int = 5, **more: Any) -> Request:
    given: dict[str, Any] = {"max_tokens": 6, **more.pop("sampling", {})}
    return Request(trajectory=trajectory, version=version, prompt=PROMPT, sampling=Sampling(**given), **more)


def finish(made: VllmEngine) -> tuple[dict[int, list[int]], list[Any], list[StepOutput]]:
    """Step until nothing is left to do; return tokens by trajectory, events, and all outputs."""
    said: dict[int, list[int]] = {}
    outputs = []
    while made.busy:
        output = made.step()
        outputs.append(output)
        for chunk in output.chunks:
            assert chunk.start == len(said.setdefault(chunk.trajectory, [])), "a gap, or a token twice"
            assert len(chunk.tokens) == len(chunk.logprobs)
            said[chunk.trajectory] += chunk.tokens.tolist()
    return said, [event for output in outputs for event in output.events], outputs


def test_versions_share_a_batch_and_every_response_carries_its_own() -> None:
    made, _ = engine()
    made.submit(request(0), 0)
    made.submit(request(1, version=6), 1)
    said, events, outputs = finish(made)
    assert said == {0: [10, 11, 12, 13, 14, 15], 1: [10, 11, 12, 13, 14, 15]}
    ends = {event.trajectory: (event.version, event.fingerprint) for event in events if isinstance(event, Generated)}
    assert ends == {0: (5, "print of 5"), 1: (6, "print of 6")}
    assert {one.reason for output in outputs for one in output.finished} == {FinishReason.LENGTH}
    assert made.stats.together == 2
    assert made.stats.decoded == 12
    assert made.spec().one_batch


def test_model_logprobs_are_left_out_where_vllm_reports_another_distribution() -> None:
    made, _ = engine()
    made.submit(request(0), 0)
    made.submit(request(1, sampling={"top_k": 5}), 0)
    _, _, outputs = finish(made)
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert {chunk.trajectory: bool(chunk.model_logprob_data) for chunk in chunks} == {0: True, 1: False}


def test_the_version_that_vllm_reports_is_compared() -> None:
    made, script = engine()
    made.submit(request(0), 0)
    script.stamp = "v6"
    with pytest.raises(IntegrityError, match="sampled from v6, but the request is for v5"):
        made.step()


def test_a_slot_with_requests_keeps_its_version() -> None:
    made, _ = engine()
    made.submit(request(0), 0)
    with pytest.raises(SlotError, match="still has requests of version 5"):
        made.load(0, 7)
    with pytest.raises(SlotError, match="partial"):
        made.load(1, 7, in_flight=True)
    with pytest.raises(VersionError):
        made.submit(request(1, version=7), 0)
    finish(made)
    made.load(0, 7)
    assert [type(event) for event in made.step().events] == [SlotLoaded]
    made.load(0, 13)
    assert [type(event) for event in made.step().events] == [SlotLoadFailed]
    assert made.serving(0) is None


def test_a_move_loses_and_repeats_no_token_and_counts_re_prefill() -> None:
    source, _ = engine()
    target, script = engine()
    source.submit(request(0), 0)
    source.submit(request(1), 0)
    source.step()
    source.step()
    bundle = source.export([0])
    left = source.drain()
    assert [chunk.tokens.tolist() for chunk in left.chunks] == [[10, 11]]
    assert not source.has(0, 0)
    assert source.has(1, 0)
    assert target.import_(bundle, 1)[0] == (), "another version"
    assert target.import_(bundle, 0) == ((0,), ())
    script.cached = 2
    outputs = []
    while target.busy:
        outputs.append(target.step())
    chunks = [chunk for output in outputs for chunk in output.chunks]
    assert [token for chunk in chunks for token in chunk.tokens.tolist()] == [12, 13, 14, 15]
    assert chunks[0].start == 2
    assert target.stats.reprefilled == len(PROMPT) + 2 - 1 - 2, "all but the last token and the cached ones"
    assert (source.stats.exported, target.stats.imported) == (1, 1)


def test_a_request_that_another_instance_began_counts_as_re_prefill() -> None:
    made, _ = engine()
    made.submit(request(0, response=(10, 11), attempt=1), 0)
    said, _, _ = finish_from(made, 2)
    assert said == [12, 13, 14, 15]
    assert made.stats.reprefilled == 5
    assert made.stats.prefilled == 1


def finish_from(made: VllmEngine, start: int) -> tuple[list[int], int, int]:
    tokens: list[int] = []
    while made.busy:
        for chunk in made.step().chunks:
            assert chunk.start == start + len(tokens)
            tokens += chunk.tokens.tolist()
    return tokens, start, len(tokens)


def test_turns_park_resume_and_end() -> None:
    made, _ = engine()
    made.submit(request(0, parks=True, sampling={"stop_ids": (11,), "max_tokens": 30}), 0)
    said, events, _ = finish(made)
    assert said == {0: [10, 11]}
    assert isinstance(events[-1], Parked)
    with pytest.raises(RequestError):
        made.extend(0, 1, [20])
    made.extend(0, 0, [20, 21])
    made.step()
    assert made.progress().tokens == {0: 5}
    made.abort(0, 0)
    made.drain()
    made.submit(request(2, parks=True, sampling={"stop_ids": (10,), "max_tokens": 30}), 0)
    finish(made)
    made.end(2, 0)
    assert isinstance(made.drain().events[-1], Generated)


def test_logits_that_are_not_finite_fail_only_that_trajectory() -> None:
    made, script = engine()
    made.submit(request(0), 0)
    made.step()
    script.broken = True
    _, events, outputs = finish(made)
    assert [type(event) for event in events] == [TrajectoryFailed]
    assert outputs[-1].finished[0].reason is FinishReason.FAILED
    assert not script.requests


def test_preemptions_are_counted_and_reported() -> None:
    made, script = engine()
    made.submit(request(0), 0)
    made.step()
    script.counters.preempted, script.counters.recomputed = 2, 17
    events = made.step().events
    assert [type(event) for event in events] == [KvPressure]
    assert (made.stats.preempted, made.stats.reprefilled) == (2, 17)


def test_every_moment_of_the_instance_has_one_label() -> None:
    made, _ = engine()
    made.note_idle(2, IdleCause(reason=IdleReason.SPARE))
    made.submit(request(0), 0)
    made.submit(request(1, version=6), 1)
    finish(made)
    (account,) = made.accounts
    account.settle(10**6)
    assert sum(account.totals.values()) == account.lifetime
    versions = {activity.version for activity in account.totals if activity.label is ActivityLabel.DECODE}
    assert versions == {5, 6}, "the time of a step is split over its versions"
