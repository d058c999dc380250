"""The simulator against reality: predicts every cell of `benchmarks.tails` from lengths and costs of the components.

    python -m benchmarks.reality [--quick]

Each cost is measured by itself (see `benchmarks.costs`): a decode step over batches and contexts, the trainer's calls
over tokens, applying, publishing, loading, moving, writing the ledger to disk, and the supervisor's processor time per
token in one short run. They go into the simulator's cost model (`benchmarks.shared_cores` models how cores are shared);
nothing is fitted to a step time or a speed of any run. Costs are processor time, so a prediction is compared with the
fastest repeat of its cell, which other programs disturbed least.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.costs import CORES, TICKS, measure
from benchmarks.decode import make_engine
from benchmarks.progress import tick
from benchmarks.report import RESULTS, Target, at_most, publish
from benchmarks.shared_cores import Measured, predict, sim_config
from benchmarks.tails import JOB, VARIANTS
from dora_rl.apps.train import read_config
from dora_rl.runtime.config import RunConfig

AIM = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.parse_args()
    config = read_config(JOB, [])
    tails = json.loads((RESULTS / "tails.json").read_text())
    total = TICKS + len(tails["tails"])
    costs, details = measure(config, total)
    cells, targets = [], []
    for number, (tail, found) in enumerate(tails["tails"].items()):
        tick(TICKS + number, total, f"predicting the {tail} tail")
        for variant in found["repeats"][0]:
            cell = _cell(config, tail, variant, [cells[variant] for cells in found["repeats"]], tails["steps"], costs)
            cells.append(cell)
            targets.append(_target(cell))
    tick(total, total, "done")
    errors = [abs(cell["error"]) for cell in cells]
    figures = {
        "costs": asdict(costs),
        "details": details,
        "cells": cells,
        "median |error|": statistics.median(errors),
        "within the aim": sum(error <= AIM for error in errors),
    }
    publish("reality", targets, figures)


def _target(cell: dict[str, Any]) -> Target:
    return at_most(f"{cell['tail']} tail, {cell['variant']}: |error| of tokens/s", AIM, abs(cell["error"]))


def _cell(
    config: RunConfig, tail: str, variant: str, found: list[dict[str, Any]], steps: int, costs: Measured
) -> dict[str, Any]:
    """One cell, predicted and measured."""
    settings = [f"{key}={value}" for key, value in VARIANTS[variant].items()]
    control = read_config(JOB, [*settings, f"control.steps={steps}"]).control.model_dump(mode="json")
    engine = {
        "slots": config.rollout.engine.slots,
        "max_requests": config.rollout.engine.max_requests,
        "kv_tokens": make_engine(config).spec().kv_tokens,
    }
    trace = str(RESULTS / "traces" / f"{tail}.jsonl")
    sim = sim_config(control, engine, config.rollout.instances, trace, costs)
    result = predict(sim, costs, CORES, config.rollout.heartbeat_seconds)
    best = max(found, key=lambda one: one["tokens"] / one["seconds"])
    rate = best["tokens"] / best["seconds"]
    return {
        "tail": tail,
        "variant": variant,
        "tokens/s": rate,
        "predicted": result.tokens_per_second,
        "error": result.tokens_per_second / rate - 1,
        "occupancy": best["occupancy"],
        "predicted occupancy": result.occupancy,
        "trainer busy": best["trainer_busy"],
        "predicted trainer busy": result.step_seconds
        * (result.trainer.get("train", 0.0) + result.trainer.get("publish", 0.0)),
    }


if __name__ == "__main__":
    main()
