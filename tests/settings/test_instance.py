"""Settings of an instance's engine: from the config file through the instance's process to how it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.requests import Request, Sampling
from dora_rl.runtime.transport import messages as m
from tests.settings.workers import InstancePart, at, folder_of, publish, supervisor

PROMPT = (3, 7, 12, 5, 14, 2, 9, 4, 6, 8)


def instance(base: Path, **engine: Any) -> InstancePart:
    folder = folder_of(base, {"rollout": {"engine": engine}})
    publish(folder)
    return InstancePart(folder)


def submit(most: int = 20, stop_ids: tuple[int, ...] = ()) -> m.SubmitRequests:
    sampling = Sampling(max_tokens=most, seed=3, stop_ids=stop_ids)
    return m.SubmitRequests(slot=0, requests=(Request(trajectory=5, version=0, prompt=PROMPT, sampling=sampling),))


def test_an_instance_says_what_room_it_was_given(base: Path) -> None:
    """`slots`, `max_requests`, `kv_bytes` in blocks of `block_size` tokens."""
    a_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes
    for block_size, tokens in ((8, 88), (16, 80), (32, 64)):
        room = {"slots": 3, "max_requests": 7, "kv_bytes": a_token * 88, "block_size": block_size}
        spec = instance(base, **room).engine.spec()
        assert (spec.slots, spec.max_requests, spec.kv_tokens) == (3, 7, tokens)


def test_the_context_ends_a_response_where_it_was_set(base: Path) -> None:
    part = instance(base, max_context=16)
    (tokens,) = part.answer(submit()).values()
    assert len(PROMPT) + len(tokens) == 16
    assert set(part.ended.values()) == {"length"}


def test_prompts_are_computed_in_chunks(base: Path) -> None:
    """`prefill_chunk`: so many tokens of a prompt in one step."""
    for chunk, steps in ((4, 3), (5, 2), (64, 1)):
        part = instance(base, prefill_chunk=chunk, stream_every=1)
        part.instance._handle(submit())
        count = 1
        while not part.engine.step().chunks:
            count += 1
        assert count == steps


def test_tokens_are_reported_as_often_as_told(base: Path) -> None:
    for every in (1, 5):
        part = instance(base, stream_every=every)
        part.instance._handle(submit(most=20))
        while part.engine.busy:
            part.instance._take(part.engine.step())
        # The first and the last report may be shorter or longer by what fell into their step.
        assert {len(chunk) for chunk in part.instance._chunks[1:-1]} == {every}


def test_kernels_are_those_asked_for(base: Path) -> None:
    generic = instance(base, kernels="torch").engine.kernels
    native = instance(base, kernels="auto").engine.kernels
    if native == generic:
        pytest.skip("there is no compiler")
    assert instance(base, kernels="native").engine.kernels == native


def test_threads_of_an_engine_are_its_own_if_set(base: Path) -> None:
    """`rollout.engine.threads`; otherwise it computes with what the supervisor says."""
    part = instance(base, threads=2)
    assert part.engine.threads == 2
    part.instance._handle(m.SetThreads(count=1))
    assert part.engine.threads == 2
    part = instance(base)
    assert part.engine.threads == 1
    part.instance._handle(m.SetThreads(count=2))
    assert part.engine.threads == 2
    part.instance._handle(m.SetThreads(count=1))


def test_an_instance_speaks_once_a_heartbeat(base: Path) -> None:
    """`rollout.heartbeat_seconds`: between two of them it says nothing, if nothing happens."""
    for seconds, reports in ((1e-6, 3), (1e9, 1)):
        folder = folder_of(base, at("rollout.heartbeat_seconds", seconds))
        publish(folder)
        part = InstancePart(folder)
        part.engine.drain()
        part.instance._last_progress_at = -1e9  # it has not spoken yet, however short the machine is up
        part.line.said.clear()
        for _ in range(3):
            part.instance._send()
        assert len(part.line.of(m.RolloutReport)) == reports


def test_experts_are_recorded_only_to_be_replayed(base: Path) -> None:
    """`trainer.moe.replay_routing`, of a mixture."""
    for replay in (True, False):
        with supervisor(base, at("trainer.moe.replay_routing", replay)) as part:
            part.run.tokenization.mixture = True
            part.begin()
            assert {request.record_experts for request in part.requests()} == {replay}
