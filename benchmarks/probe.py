"""The behaviour probe: its cost per load, the difference between sound slots and the trainer, and what it detects.

    python -m benchmarks.probe [--models quickstart,smollm2] [--threads 1]

The trainer publishes a version and the built-in engine loads it; both are timed, and so is the probe alone. Then single
weights of the slot are changed by multiples of the standard deviation of their matrix, and the benchmark counts how
many of these changes the probe detects.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import at_most, publish
from dora_rl.core.errors import ProbeError
from dora_rl.core.events import SlotLoaded
from dora_rl.core.types import SlotId
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.runner import Runner
from dora_rl.models.loading import ModelConfig, load
from dora_rl.runtime.transport.weight_source import StoreWeights
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore

LOADS = 5
CHANGES = (0.1, 1.0, 3.0, 10.0)
PLACES = 12
_SLOT = SlotId("engine", 0)
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def folder(name: str) -> str:
    """Path of a model."""
    if name == "smollm2":
        from benchmarks.smollm2 import ensure

        return str(ensure())
    return str(Path("examples/quickstart/warm"))


def measure(name: str, threads: int) -> dict[str, Any]:
    """All figures of one model."""
    torch.set_num_threads(threads)
    model: Any = load(ModelConfig(path=folder(name))).model
    trainer = Trainer(copy.deepcopy(model), TrainerConfig())
    store = WeightStore.in_shared_memory(f"bench-probe-{os.getpid()}", keep=LOADS)
    try:
        computing, publishing, loading, differences = [], [], [], []
        tolerance = 0.0
        engine = Engine(model, StoreWeights(store, model, None), EngineConfig(kv_bytes=64 << 20, threads=threads))
        for version in range(LOADS):
            trainer.version = version
            computing.append(_seconds(trainer.probe))
            publishing.append(_seconds(lambda version=version: trainer.publish(version, store)))
            begin = time.perf_counter()
            engine.load(0, version)
            engine.wait_for_loads()
            loading.append(time.perf_counter() - begin)
            (event,) = engine.drain().events
            assert isinstance(event, SlotLoaded), event
            assert event.probe is not None
            differences.append(event.probe.difference)
            tolerance = event.probe.tolerance
        runner = _runner(engine, model)
        probing = [_seconds(lambda: _check(engine, runner, trainer, threads)) for _ in range(LOADS)]
        return {
            "kernels": engine.kernels,
            "probe of the trainer, ms": 1e3 * statistics.median(computing),
            "publishing with it, ms": 1e3 * statistics.median(publishing),
            "probe of a slot, ms": 1e3 * statistics.median(probing),
            "load with it, ms": 1e3 * statistics.median(loading),
            "share of the load": statistics.median(probing) / statistics.median(loading),
            "share of publishing and load": (statistics.median(probing) + statistics.median(computing))
            / (statistics.median(loading) + statistics.median(publishing)),
            "largest difference": max(differences),
            "tolerance": tolerance,
            "noticed": noticed(engine, model, trainer, threads),
        }
    finally:
        store.clear()


def noticed(engine: Engine, model: Any, trainer: Trainer, threads: int) -> dict[str, float]:
    """Share of changes to a single weight that the probe detects, by size in standard deviations of the matrix."""
    generator = torch.Generator().manual_seed(0)
    matrices = [(key, one) for key, one in model.named_parameters() if key.split(".")[-2] in _MATRICES]
    found: dict[str, int] = dict.fromkeys(map(str, CHANGES), 0)
    for _ in range(PLACES):
        matrix = matrices[int(torch.randint(len(matrices), (1,), generator=generator))][1].data
        flat, place = matrix.view(-1), int(torch.randint(matrix.numel(), (1,), generator=generator))
        former = float(flat[place])
        for size in CHANGES:
            flat[place] = former + size * float(matrix.std())
            try:
                _check(engine, _runner(engine, model), trainer, threads)
            except ProbeError:
                found[str(size)] += 1
            flat[place] = former
    return {size: count / PLACES for size, count in found.items()}


def _runner(engine: Engine, model: Any) -> Runner:
    """A runner with the module's own weights."""
    return engine._make({key: tensor.detach() for key, tensor in model.state_dict().items()})


def _check(engine: Engine, runner: Runner, trainer: Trainer, threads: int) -> None:
    """The check that ends every load."""
    probe = engine._weights.probe(trainer.version)
    assert probe is not None
    engine._prober.check(runner, probe, _SLOT, trainer.version, threads)


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Measure, print, and write `results/probe.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="quickstart,smollm2")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    figures = {name: measure(name, given.threads) for name in given.models.split(",")}
    table = Table(title=f"probe, {given.threads} threads, median of {LOADS}")
    table.add_column("")
    for name in figures:
        table.add_column(name, justify="right")
    for key in next(iter(figures.values())):
        values = [one[key] for one in figures.values()]
        if key == "noticed":
            for size in CHANGES:
                table.add_row(f"one weight changed by {size:g} sd: noticed", *(f"{v[str(size)]:.0%}" for v in values))
        else:
            table.add_row(key, *(v if isinstance(v, str) else f"{v:.3g}" for v in values))
    Console().print(table)
    targets = [
        at_most(f"{name}: difference over tolerance", 0.1, one["largest difference"] / one["tolerance"])
        for name, one in figures.items()
    ]
    if "quickstart" in figures:
        targets.append(at_most("quickstart: probe of a slot, ms", 20, figures["quickstart"]["probe of a slot, ms"]))
    publish("probe", targets, {"threads": given.threads, "models": figures})


if __name__ == "__main__":
    main()
