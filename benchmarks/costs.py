"""Costs of the components of a run on this machine, each measured by itself; the simulator predicts runs from them.

The other cores are busy during the measurements, as they are in a run, because cores share caches and memory. The work
of one thread is measured in processor time, so that interruptions by other programs do not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decode import all_decode, clock_of, decode_points, make_engine, request
from benchmarks.processes import Watch
from benchmarks.progress import tick
from benchmarks.running import command_of, read
from benchmarks.shared_cores import Measured
from benchmarks.tails import JOB, VARIANTS
from dora_rl.apps.train import read_config
from dora_rl.core.events import Tick
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.engine.engine import Engine
from dora_rl.ledger.ledger import Ledger
from dora_rl.models.loading import load
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.transport.weight_source import StoreWeights
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore

CORES = os.cpu_count() or 1
BATCHES = (1, 4, 16, 32, 64)
CONTEXTS = (32, 256, 768)
PROMPT = 7
TICKS = 5
"""Number of progress lines that `measure` prints."""


def measure(config: RunConfig, total: int) -> tuple[Measured, dict[str, Any]]:
    """All costs, and how well linear models fit them."""
    tick(0, total, "decode steps")
    with _busy_neighbours():
        points = decode_points(config, 1, BATCHES, CONTEXTS)
        rows = [(1.0, batch, tokens) for (batch, _), (tokens, _) in points.items()]
        base, per_request, per_token = _fit(rows, [seconds for _, seconds in points.values()])
        tick(1, total, "the trainer's calls")
        calls, apply = _train_points(config, 1)
        train_call, train_token = _fit([(1.0, tokens) for tokens, _ in calls], [seconds for _, seconds in calls])
        tick(2, total, "publishing, loading, moving, the ledger")
        publishing, loading = _publish_and_load(config)
        moving, durable = _move(config), _durable()
    tick(3, total, "all cores for one")
    alone = decode_points(config, CORES, BATCHES, CONTEXTS)
    decode_speed = statistics.median(points[at][1] / alone[at][1] for at in points)
    fast, _ = _train_points(config, CORES)
    train_speed = sum(seconds for _, seconds in calls) / sum(seconds for _, seconds in fast)
    tick(4, total, "a short run, for the supervisor's time")
    per_generated, scoring, shares = _supervisor()
    costs = Measured(
        step_base=base,
        per_request=per_request,
        per_token=per_token,
        per_generated=per_generated,
        train_call=train_call,
        train_token=train_token,
        apply=apply,
        durable=durable,
        score=scoring,
        publish=publishing,
        load=loading,
        move=moving,
        decode_speed=decode_speed,
        train_speed=train_speed,
    )
    details = {
        "decode (batch, context in all, seconds, fitted)": [
            (batch, tokens, seconds, base + per_request * batch + per_token * tokens)
            for (batch, _), (tokens, seconds) in points.items()
        ],
        "train (tokens, seconds, fitted)": [
            (tokens, seconds, train_call + train_token * tokens) for tokens, seconds in calls
        ],
        "processor seconds by role in a short run": shares,
    }
    return costs, details


def _fit(rows: Sequence[tuple[float, ...]], seconds: list[float]) -> list[float]:
    """Coefficients by least squares of relative errors, with no cost below a nanosecond."""
    y = np.array(seconds)
    x = np.array(rows) / y[:, None]
    solution, *_ = np.linalg.lstsq(x, np.ones(len(y)), rcond=None)
    return [max(1e-9, float(value)) for value in solution]


@contextlib.contextmanager
def _busy_neighbours() -> Iterator[None]:
    """Keep the other cores busy with decoding."""
    command = [sys.executable, "-m", "benchmarks.costs"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    neighbours = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(CORES - 1)
    ]
    for process in neighbours:
        assert process.stdout is not None
        process.stdout.readline()  # wait until it decodes
    try:
        yield
    finally:
        for process in neighbours:
            process.terminate()
            process.wait()


def keep_busy(config: RunConfig) -> None:
    """Decode until the parent process ends."""
    engine = make_engine(config)
    print("busy", flush=True)
    number = 0
    while os.getppid() > 1:
        for _ in range(16):
            engine.submit(request(number, 32, 200))
            number += 1
        while engine.busy:
            engine.step()


def _train_points(config: RunConfig, threads: int) -> tuple[list[tuple[int, float]], float]:
    """Tokens and seconds of the trainer's calls with 1, 2, 4 and 8 groups, and the seconds of `apply`."""
    torch.set_num_threads(threads)
    clock = clock_of(threads)
    trainer = Trainer(load(config.model).model, config.trainer)
    random = np.random.default_rng(0)
    calls: list[tuple[int, float]] = []
    applying = []
    for step, count in enumerate((2, 1, 2, 4, 8, 1, 2, 4, 8)):
        groups = [_group(random, step, number, config.control.group_size) for number in range(count)]
        begin = clock()
        trainer.accumulate(step, groups)
        middle = clock()
        trainer.apply(step)
        if step:  # the first step warms up
            calls.append((sum(len(t.tokens) for g in groups for t in g.trajectories), middle - begin))
            applying.append(clock() - middle)
    return calls, statistics.median(applying)


def _group(random: np.random.Generator, version: int, number: int, size: int) -> Group:
    """A group with lengths as in the job."""
    siblings = []
    for sibling in range(size):
        tokens = random.integers(3, 16, PROMPT + int(np.clip(random.lognormal(4.3, 0.8), 5, 900)))
        siblings.append(
            Trajectory(
                id=number * size + sibling,
                version=version,
                tokens=tokens.astype(np.int32),
                loss_mask=np.arange(len(tokens)) >= PROMPT,
                behaviour_logprobs=np.full(len(tokens), -2.0, np.float32),
                reward=float(random.random()),
            )
        )
    return Group(id=number, trajectories=tuple(siblings))


def _publish_and_load(config: RunConfig) -> tuple[float, float]:
    """Median seconds to publish a version on disk, and to load it into an engine."""
    trainer = Trainer(load(config.model).model, config.trainer)
    model = load(config.model).model
    publishing, loading = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(Path(folder), keep=2, durable=True)
        engine = Engine(model, StoreWeights(store, model, None), config.rollout.engine)
        for version in range(7):
            trainer.version = version
            begin = time.perf_counter()
            trainer.publish(version, store)
            middle = time.perf_counter()
            engine.load(0, version)
            engine.wait_for_loads()
            publishing.append(middle - begin)
            loading.append(time.perf_counter() - middle)
    return statistics.median(publishing), statistics.median(loading)


def _move(config: RunConfig) -> float:
    """Median seconds to move a KV bundle of four requests between two engines."""
    source, target = make_engine(config), make_engine(config)
    took = []
    for repeat in range(7):
        some = range(4 * repeat, 4 * repeat + 4)
        for number in some:
            source.submit(request(number, 128, 512))  # long enough not to finish: a call may run several steps
        while not all_decode(source, len(some)):
            pass
        begin = time.perf_counter()
        arrived, errors = target.import_(source.export(list(some)), 0)
        took.append(time.perf_counter() - begin)
        assert len(arrived) == len(some)
        assert not errors
    return statistics.median(took)


def _durable() -> float:
    """Median seconds from an event until it is on disk."""
    took = []
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.db", 4)
        for number in range(20):
            begin = time.perf_counter()
            written = ledger.log(Tick(), [], number)
            ledger.sync()
            while ledger.durable < written:
                time.sleep(0.0002)
            took.append(time.perf_counter() - begin)
        ledger.close()
    return statistics.median(took)


def _supervisor() -> tuple[float, float, dict[str, float]]:
    """Processor seconds of the supervisor and reward workers per generated token; seconds to a reward; all by role."""
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(JOB, Path(folder), **VARIANTS["dora K=4"], **{"control.steps": 12})
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with Watch(process.pid) as watch:
            if process.wait(300):
                raise RuntimeError("the short run failed")
        tokens = read(Path(folder) / "run").tokens
        scoring = _scoring(Path(folder) / "run" / "events.jsonl")
    spent = watch.spent("trainer")
    ours = sum(seconds for name, seconds in spent.items() if name == "supervisor" or name.startswith("reward"))
    return ours / tokens, scoring, spent


def _scoring(events: Path) -> float:
    """Median seconds from the end of a response to its reward."""
    ended: dict[int, int] = {}
    took: list[float] = []
    for line in events.read_text().splitlines():
        one = json.loads(line)
        event = one["event"]
        if event["event"] == "Generated":
            ended[event["trajectory"]] = one["at"]
        elif event["event"] == "Scored":
            took.append(float(one["at"] - ended[event["trajectory"]]) / 1e9)
    return statistics.median(took)


if __name__ == "__main__":
    keep_busy(read_config(JOB, []))
