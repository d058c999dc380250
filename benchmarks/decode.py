"""Decode steps of one engine, measured by themselves: what costs, bounds and predictions are made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import load
from dora_rl.models.sources import MemoryWeights
from dora_rl.runtime.config import RunConfig

CALLS = 10
"""Of the engine in one measurement."""
BATCHES = (8, 24, 64)
"""Of which one uses a core best: small ones keep their KV in its caches, large ones use its weights more often."""


def peak_rate(config: RunConfig, context: float) -> float:
    """Best tokens/s of an engine with one thread, over sizes of its batch, at this context of its requests on average.

    Contexts grow while they are measured, so each size is measured at two, and the context asked for lies on the line
    through them.
    """
    contexts = (max(1, round(context / 2)), max(2, round(context)))
    points = decode_points(config, 1, BATCHES, contexts)
    spare = config.rollout.engine.block_size / 2  # of a request's last block, on average
    best = 0.0
    for batch in BATCHES:
        (tokens, seconds), (more, longer) = (points[batch, one] for one in contexts)
        wanted = batch * (context + spare)
        best = max(best, batch / (seconds + (longer - seconds) * (wanted - tokens) / (more - tokens)))
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
    """Seconds of the processor for one thread, of the wall for more."""
    return time.process_time if threads == 1 else time.perf_counter


def decode_points(
    config: RunConfig, threads: int, batches: Sequence[int], contexts: Sequence[int]
) -> dict[tuple[int, int], tuple[int, float]]:
    """By batch and context: tokens of context in all, halfway, and median seconds of a step."""
    engine, clock = make_engine(config, threads), clock_of(threads)
    points: dict[tuple[int, int], tuple[int, float]] = {}
    number = 0
    for context in contexts:
        for batch in batches:
            for _ in range(batch):
                # Long enough for those that are prefilled first to be there when the last one is.
                engine.submit(request(number, context, config.rollout.engine.max_context - context - 1))
                number += 1
            while not all_decode(engine, batch):
                pass
            took, before = [], engine.progress().kv_tokens
            for _ in range(CALLS):  # a call may be several decode steps
                decoded, begin = engine.stats.decoded, clock()
                engine.step()
                took.append((clock() - begin) * batch / (engine.stats.decoded - decoded))
            points[batch, context] = (before + engine.progress().kv_tokens) // 2, statistics.median(took)
            for trajectory in range(number - batch, number):
                engine.abort(trajectory, 0)
            engine.step()
    return points


def all_decode(engine: Engine, batch: int) -> bool:
    """Every request of the batch got a token in the step just made."""
    before = engine.stats.decoded
    engine.step()
    return engine.stats.decoded - before >= batch
