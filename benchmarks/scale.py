"""How costs grow with size: exponents of power laws, fitted as straight lines through logarithms.

    python -m benchmarks.scale [--quick]

A cost with exponent 0 does not grow; one with exponent 1 grows in proportion. The orchestrator's events are measured on
the simulator's preset `laptop`, with a constant load per instance as the fleet grows; the engine and the trainer are
measured on the 3M model in the processor time of one thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.control import event_microseconds
from benchmarks.engine import folder_of, make_engine
from benchmarks.progress import tick
from benchmarks.report import Target, at_most, publish
from benchmarks.trainer import make_model
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Request, Sampling
from dora_rl.models.loading import ModelConfig, load
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.trainer import Trainer

INSTANCES = (64, 256, 1024, 4096)
REQUESTS = (8, 16, 32, 64, 128)
STALENESS = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (64, 128, 256, 512, 1024)
TOKENS = (256, 512, 1024, 2048, 4096)
EVENTS = {True: 8_000, False: 30_000}
STEPS = 20
"""Decode steps in one measurement."""


def exponent(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line through the logarithms, and its standard error."""
    a, b = np.log(np.array(x)), np.log(np.array(y))
    slope, intercept = np.polyfit(a, b, 1)
    rest = b - slope * a - intercept
    error = math.sqrt(float((rest**2).sum()) / max(1, len(a) - 2) / float(((a - a.mean()) ** 2).sum()))
    return float(slope), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    repeats = 1 if given.quick else 3
    events = EVENTS[given.quick]
    torch.set_num_threads(1)
    series: list[tuple[str, str, str, Sequence[int], Callable[[int], float], float | None]] = [
        (
            "an event of the orchestrator",
            "instances",
            "us",
            INSTANCES[:3] if given.quick else INSTANCES,
            lambda n: event_microseconds(n, events=events),
            0.2,
        ),
        (
            "an event of the orchestrator",
            "requests of an instance",
            "us",
            REQUESTS,
            lambda n: event_microseconds(64, requests=n, events=events),
            0.5,
        ),
        (
            "an event of the orchestrator",
            "K",
            "us",
            STALENESS,
            lambda n: event_microseconds(64, staleness=n, events=events),
            0.5,
        ),
        *_engine_series(),
        ("a call of the trainer (3M)", "tokens", "s", TOKENS, _train_seconds, None),
    ]
    total = sum(len(values) for *_, values, _, _ in series) * repeats
    done = 0
    rows: list[dict[str, Any]] = []
    targets: list[Target] = []
    for what, along, unit, values, cost, aim in series:
        found: dict[int, list[float]] = {value: [] for value in values}
        for _ in range(repeats):
            for value in values:
                tick(done, total, f"{what} over {along}: {value}")
                found[value].append(cost(value))
                done += 1
        costs = [statistics.median(some) for some in found.values()]
        slope, error = exponent(values, costs)
        row = {"what": what, "along": along, "unit": unit, "values": list(values), "costs": costs}
        rows.append(row | {"runs": list(found.values()), "exponent": slope, "error": error})
        if aim is not None:
            targets.append(at_most(f"{what}, over {along}: exponent", aim, slope))
    tick(total, total, "done")
    publish("scale", targets, {"repeats": repeats, "series": rows})


def _engine_series() -> list[tuple[str, str, str, Sequence[int], Callable[[int], float], float | None]]:
    model = load(ModelConfig(path=str(folder_of("3m")))).model
    engine = make_engine(model, max_requests=128)
    return [
        ("a decode step (3M)", "batch at context 64", "ms", BATCHES, lambda n: _step_ms(engine, n, 64), None),
        ("a decode step (3M)", "context at batch 16", "ms", CONTEXTS, lambda n: _step_ms(engine, 16, n), None),
        ("moving a request (3M)", "context", "ms", CONTEXTS, lambda n: _move_ms(model, n), None),
    ]


_numbers = iter(range(1 << 40))


def _submit(engine: Engine, batch: int, context: int) -> list[int]:
    """Submit a batch of requests and step until all of them decode."""
    some = [next(_numbers) for _ in range(batch)]
    for number in some:
        prompt = tuple(np.random.default_rng(number).integers(3, 120, context).tolist())
        request = Request(trajectory=number, version=0, prompt=prompt, sampling=Sampling(max_tokens=900))
        engine.submit(request)
    before = 0
    while engine.stats.decoded - before < batch:  # until one step gives each of them a token
        before = engine.stats.decoded
        engine.step()
    return some


def _step_ms(engine: Engine, batch: int, context: int) -> float:
    some = _submit(engine, batch, context)
    took = []
    for _ in range(STEPS):
        begin = time.process_time()
        engine.step()
        took.append(time.process_time() - begin)
    for number in some:
        engine.abort(number, 0)
    engine.step()
    return statistics.median(took) * 1e3


def _move_ms(model: Any, context: int) -> float:
    source, target = make_engine(model), make_engine(model)
    took = []
    for _ in range(5):
        some = _submit(source, 1, context)
        begin = time.process_time()
        target.import_(source.export(some), 0)
        took.append(time.process_time() - begin)
        target.abort(some[0], 0)
    return statistics.median(took) * 1e3


def _train_seconds(tokens: int) -> float:
    """One call with groups of four trajectories of 128 tokens."""
    trainer = Trainer(make_model("3m"), TrainerConfig())
    took = []
    for step in range(2):
        groups = [_group(step, number) for number in range(max(1, tokens // 512))]
        if tokens < 512:
            siblings = groups[0].trajectories[: tokens // 128]
            groups = [Group(id=0, trajectories=siblings)]
        begin = time.process_time()
        trainer.accumulate(step, groups)
        took.append(time.process_time() - begin)
        trainer.apply(step)
    return took[-1]


def _group(version: int, number: int) -> Group:
    random = np.random.default_rng(number)
    return Group(
        id=number,
        trajectories=tuple(
            Trajectory(
                id=4 * number + sibling,
                version=version,
                tokens=random.integers(1, 128, 128).astype(np.int32),
                loss_mask=np.arange(128) >= 16,
                behaviour_logprobs=np.full(128, -5.0, np.float32),
                reward=float(random.random()),
            )
            for sibling in range(4)
        ),
    )


if __name__ == "__main__":
    main()
