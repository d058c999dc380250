"""Measures decode steps of one engine by itself; costs, bounds and predictions are computed from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import load
from dora_rl.models.sources import MemoryWeights
from dora_rl.runtime.config import RunConfig

ROUNDS = 16
"""Tokens that each request samples in one measurement."""
BATCHES = (8, 24, 64)
"""One of these sizes uses a core best: small batches keep their KV in its caches, large ones reuse weights more."""
SHARES = (0.25, 0.5, 1.0)
"""Shares of the requested context at which steps are measured."""


def peak_rate(config: RunConfig, context: float) -> float:
    """Best tokens/s of an engine with one thread over its batch sizes, at this mean context of its requests.

    Contexts grow during a measurement, so each batch size is measured at several contexts, and the rate at the
    requested one is read from the line through them.
    """
    contexts = tuple(max(1, round(context * share)) for share in SHARES)
    points = decode_points(config, 1, BATCHES, contexts)
    spare = config.rollout.engine.block_size / 2  # unused part of a request's last block, on average
    best = 0.0
    for batch in BATCHES:
        held, seconds = zip(*(points[batch, one] for one in contexts), strict=True)
        slope, base = np.polyfit(held, seconds, 1)
        best = max(best, batch / float(base + slope * batch * (context + spare)))
    return best


def make_engine(config: RunConfig, threads: int = 1) -> Engine:
    loaded = load(config.model)
    engine = Engine(loaded.model, MemoryWeights.of(loaded.model), config.rollout.engine)
    engine.set_threads(threads)
    engine.load(0, 0)
    engine.wait_for_loads()
    return engine


def request(number: int, context: int, tokens: int) -> Request:
    prompt = tuple(np.random.default_rng(number).integers(3, 16, context).tolist())
    return Request(trajectory=number, version=0, prompt=prompt, sampling=Sampling(max_tokens=tokens))


def clock_of(threads: int) -> Callable[[], float]:
    """Processor time for one thread, wall-clock time for more."""
    return time.process_time if threads == 1 else time.perf_counter


def decode_points(
    config: RunConfig, threads: int, batches: Sequence[int], contexts: Sequence[int]
) -> dict[tuple[int, int], tuple[int, float]]:
    """By batch and context: total tokens of context halfway through, and seconds per token of every request."""
    engine, clock = make_engine(config, threads), clock_of(threads)
    points: dict[tuple[int, int], tuple[int, float]] = {}
    number = 0
    for context in contexts:
        for batch in batches:
            for _ in range(batch):
                # Long enough that the first requests still decode when the last one is prefilled.
                engine.submit(request(number, context, config.rollout.engine.max_context - context - 1))
                number += 1
            while not all_decode(engine, batch):
                pass
            _decoded(engine, batch, 2)  # lets the engine measure its pace again
            before, begin = engine.progress().kv_tokens, clock()
            sampled = _decoded(engine, batch, ROUNDS)
            took = clock() - begin
            points[batch, context] = (before + engine.progress().kv_tokens) // 2, took * batch / sampled
            assert engine.slots[0].batch.decoding == batch, "a request ended while it was measured"
            for trajectory in range(number - batch, number):
                engine.abort(trajectory, 0)
            engine.step()
    return points


def all_decode(engine: Engine, batch: int) -> bool:
    """Run one step; True once every request decodes. The long pace makes decoding requests take one token a call."""
    engine.slots[0].pace = 1 << 40
    engine.step()
    return engine.slots[0].batch.decoding >= batch


def _decoded(engine: Engine, batch: int, rounds: int) -> int:
    """Step until each request has sampled `rounds` tokens on average; returns the total number of tokens."""
    before = engine.stats.decoded
    while engine.stats.decoded - before < batch * rounds:
        engine.step()
    return engine.stats.decoded - before
