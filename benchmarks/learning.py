"""Does asynchrony cost learning? Held-out accuracy against steps and against seconds, for every mode and five seeds.

    python -m benchmarks.learning [--seeds 5] [--steps 60]
    python -m benchmarks.learning --plots     # draw the plots again from results/learning.json

There are two jobs: the quickstart, where rewards come at once and runs wait for the trainer, and the same task with a
slow verifier. The raw curves go to `results/learning.json` and the plots to `docs/`; the tables are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks import plots
from benchmarks.plots import Band
from benchmarks.report import RESULTS, Target, at_least, publish
from benchmarks.running import Figures, run

ROOT = Path(__file__).parent.parent
MODES: dict[str, dict[str, object]] = {
    "sync": {"control.mode": "sync"},
    "one_step_off": {"control.mode": "one_step_off"},
    "partial K=3": {"control.mode": "partial", "control.max_staleness": 3},
    "dora K=1": {"control.max_staleness": 1},
    "dora K=3": {"control.max_staleness": 3},
    "dora K=7": {"control.max_staleness": 7},
}


class Job(NamedTuple):
    """A task and the modes that are compared on it."""

    config: Path
    modes: tuple[str, ...]
    plot: Path
    sooner: float
    """The aim: `sync` takes at least this many times the seconds of `dora K=3`."""


JOBS = {
    "quickstart": Job(
        ROOT / "examples" / "quickstart" / "quickstart.toml", tuple(MODES), ROOT / "docs" / "learning.svg", 1.0
    ),
    "verified": Job(
        ROOT / "benchmarks" / "jobs" / "verified.toml",
        ("sync", "partial K=3", "dora K=3"),
        ROOT / "docs" / "learning-verified.svg",
        1.5,
    ),
}
Evaluations = list[tuple[int, float, float]]
"""Version, seconds and accuracy of each evaluation of one run."""
_CURVES = "evaluations (version, seconds, accuracy)"
_console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plots", action="store_true", help="draw the plots from the recorded curves and stop")
    arguments = parser.parse_args()
    if arguments.plots:
        recorded = json.loads((RESULTS / "learning.json").read_text())[_CURVES]
        for name, job in JOBS.items():
            _draw(job, recorded[name])
        return
    targets: list[Target] = []
    curves: dict[str, Any] = {}
    for name, job in JOBS.items():
        found = _learned(name, job, arguments.seeds, arguments.steps)
        curves[name] = {mode: [one.evaluations for one in some] for mode, some in found.items()}
        _draw(job, curves[name])
        targets += _targets(name, job, found)
        _console.print(_table(found))
    publish("learning", targets, {"steps": arguments.steps, _CURVES: curves})


def _learned(name: str, job: Job, seeds: int, steps: int) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {mode: [] for mode in job.modes}
    left = seeds * len(job.modes)
    for seed in range(seeds):
        for mode in job.modes:
            begin = time.monotonic()
            settings = MODES[mode] | {"seed": seed, "data.seed": seed, "control.steps": steps}
            one = run(job.config, **settings, **{"trainer.optimiser.total_updates": steps})
            found[mode].append(one)
            left -= 1
            seconds = time.monotonic() - begin
            first, last = one.evaluations[0][2], one.evaluations[-1][2]
            _console.print(
                f"{name}, seed {seed} {mode}: {first:.1%} -> {last:.1%} in {one.seconds:.0f} s "
                f"(about {left * seconds / 60:.0f} min left)"
            )
    return found


def _targets(name: str, job: Job, found: dict[str, list[Figures]]) -> list[Target]:
    """What is expected: no loss at equal steps, and a lead at equal time."""
    final = {mode: [one.evaluations[-1][2] for one in some] for mode, some in found.items()}
    noise = _half_width(final["sync"]) + _half_width(final["dora K=3"])
    difference = statistics.mean(final["dora K=3"]) - statistics.mean(final["sync"])
    time_ratio = statistics.median(
        sync.seconds / dora.seconds for sync, dora in zip(found["sync"], found["dora K=3"], strict=True)
    )
    return [
        at_least(f"{name}: dora K=3 - sync at equal steps, accuracy; minus the noise", -noise, difference),
        at_least(f"{name}: seconds of sync over dora K=3 for the same steps", job.sooner, time_ratio),
        at_least(f"{name}: lowest final accuracy of dora K=3 over the seeds", 0.85, min(final["dora K=3"])),
    ]


def _half_width(values: Sequence[float]) -> float:
    """Half the width of a 95% interval of the mean, by Student's t."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.2)
    return t * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _draw(job: Job, curves: dict[str, list[Evaluations]]) -> None:
    title = "held-out accuracy, mean and 95% interval over the seeds"
    plots.curves(job.plot, title, {mode: _bands(runs) for mode, runs in curves.items()})


def _bands(runs: list[Evaluations]) -> tuple[Band, Band]:
    """Mean and 95% band over the seeds: against steps, and against the seeds' mean seconds."""
    columns = list(zip(*runs, strict=True))
    means = [statistics.mean(point[2] for point in column) for column in columns]
    widths = [_half_width([point[2] for point in column]) for column in columns]
    steps = [float(column[0][0]) for column in columns]
    seconds = [statistics.mean(point[1] for point in column) for column in columns]
    return Band(steps, means, widths), Band(seconds, means, widths)


def _table(found: dict[str, list[Figures]]) -> str:
    rows: list[Any] = ["| mode | start | end | lowest seed | seconds |", "|---|---|---|---|---|"]
    for mode, some in found.items():
        first = statistics.mean(one.evaluations[0][2] for one in some)
        final = [one.evaluations[-1][2] for one in some]
        seconds = statistics.mean(one.seconds for one in some)
        rows.append(
            f"| {mode} | {first:.1%} | {statistics.mean(final):.1%} ± {_half_width(final):.1%} | {min(final):.1%} "
            f"| {seconds:.0f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
