"""Engine settings, from the config file through the rollout worker to how it serves requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.requests import Request, Sampling
from dora_rl.runtime.transport import messages as m
from tests.settings.workers import InstanceHarness, at, folder_of, publish, supervisor

PROMPT = (3, 7, 12, 5, 14, 2, 9, 4, 6, 8)


def instance(base: Path, **engine: Any) -> InstanceHarness:
    folder = folder_of(base, {"rollout": {"engine": engine}})
    publish(folder)
    return InstanceHarness(folder)


def submit(max_tokens: int = 20, stop_ids: tuple[int, ...] = ()) -> m.SubmitRequests:
    sampling = Sampling(max_tokens=max_tokens, seed=3, stop_ids=stop_ids)
    return m.SubmitRequests(slot=0, requests=(Request(trajectory=5, version=0, prompt=PROMPT, sampling=sampling),))


def test_an_instance_reports_its_configured_capacity(base: Path) -> None:
    """This covers `slots`, `max_requests`, and `kv_bytes` in blocks of `block_size` tokens."""
    a_token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, numbers, bytes
    for block_size, tokens in ((8, 88), (16, 80), (32, 64)):
        room = {"slots": 3, "max_requests": 7, "kv_bytes": a_token * 88, "block_size": block_size}
        spec = instance(base, **room).engine.spec()
        assert (spec.slots, spec.max_requests, spec.kv_tokens) == (3, 7, tokens)


def test_a_response_ends_at_the_configured_context_length(base: Path) -> None:
    harness = instance(base, max_context=16)
    (tokens,) = harness.answer(submit()).values()
    assert len(PROMPT) + len(tokens) == 16
    assert set(harness.ended.values()) == {"length"}


def test_prompts_are_computed_in_chunks(base: Path) -> None:
    """One step computes at most `prefill_chunk` tokens of a prompt."""
    for chunk, steps in ((4, 3), (5, 2), (64, 1)):
        harness = instance(base, prefill_chunk=chunk, stream_every=1)
        harness.instance._handle(submit())
        count = 1
        while not harness.engine.step().chunks:
            count += 1
        assert count == steps


def test_tokens_are_reported_at_the_configured_interval(base: Path) -> None:
    for every in (1, 5):
        harness = instance(base, stream_every=every)
        harness.instance._handle(submit(max_tokens=20))
        while harness.engine.busy:
            harness.instance._take(harness.engine.step())
        # The first and last reports may contain a different number of tokens.
        assert {len(chunk) for chunk in harness.instance._chunks[1:-1]} == {every}


def test_the_configured_kernels_are_used(base: Path) -> None:
    generic = instance(base, kernels="torch").engine.kernels
    native = instance(base, kernels="auto").engine.kernels
    if native == generic:
        pytest.skip("there is no compiler")
    assert instance(base, kernels="native").engine.kernels == native


def test_configured_engine_threads_override_the_supervisor(base: Path) -> None:
    """`rollout.engine.threads` is used if set, and otherwise the thread count that the supervisor sends."""
    harness = instance(base, threads=2)
    assert harness.engine.threads == 2
    harness.instance._handle(m.SetThreads(count=1))
    assert harness.engine.threads == 2
    harness = instance(base)
    assert harness.engine.threads == 1
    harness.instance._handle(m.SetThreads(count=2))
    assert harness.engine.threads == 2
    harness.instance._handle(m.SetThreads(count=1))


def test_an_idle_instance_reports_once_per_heartbeat(base: Path) -> None:
    """An idle instance sends no reports between two heartbeats (`rollout.heartbeat_seconds`)."""
    for seconds, reports in ((1e-6, 3), (1e9, 1)):
        folder = folder_of(base, at("rollout.heartbeat_seconds", seconds))
        publish(folder)
        harness = InstanceHarness(folder)
        harness.engine.drain()
        harness.instance._last_progress_at = -1e9  # no report was sent yet, even if the machine has just booted
        harness.channel.sent.clear()
        for _ in range(3):
            harness.instance._send()
        assert len(harness.channel.of(m.RolloutReport)) == reports


def test_experts_are_recorded_only_for_replay(base: Path) -> None:
    """`trainer.moe.replay_routing` controls recording for a mixture-of-experts model."""
    for replay in (True, False):
        with supervisor(base, at("trainer.moe.replay_routing", replay)) as harness:
            harness.run.tokenization.mixture = True
            harness.begin()
            assert {request.record_experts for request in harness.requests()} == {replay}
