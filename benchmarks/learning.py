"""Does asynchrony cost learning? Held-out accuracy against steps and against seconds, for every mode and five seeds.

Writes the raw curves to `results/learning.json`, and the plot and a table to `docs/`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.curves import Band, draw
from benchmarks.report import Target, at_least, publish
from benchmarks.running import Figures, run

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "examples" / "quickstart" / "quickstart.toml"
MODES: dict[str, dict[str, object]] = {
    "sync": {"control.mode": "sync"},
    "one_step_off": {"control.mode": "one_step_off"},
    "partial K=3": {"control.mode": "partial", "control.max_staleness": 3},
    "dora K=1": {"control.max_staleness": 1},
    "dora K=3": {"control.max_staleness": 3},
    "dora K=7": {"control.max_staleness": 7},
}
_console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    found: dict[str, list[Figures]] = {mode: [] for mode in MODES}
    left = arguments.seeds * len(MODES)
    for seed in range(arguments.seeds):
        for mode, settings in MODES.items():
            begin = time.monotonic()
            settings = settings | {"seed": seed, "data.seed": seed, "control.steps": arguments.steps}
            one = run(CONFIG, **settings, **{"trainer.optimiser.total_updates": arguments.steps})
            found[mode].append(one)
            left -= 1
            seconds = time.monotonic() - begin
            first, last = one.evaluations[0][2], one.evaluations[-1][2]
            _console.print(
                f"seed {seed} {mode}: {first:.1%} -> {last:.1%} in {one.seconds:.0f} s "
                f"(about {left * seconds / 60:.0f} min left)"
            )
    draw(ROOT / "docs" / "learning.svg", {mode: _bands(some) for mode, some in found.items()})
    curves = {mode: [one.evaluations for one in some] for mode, some in found.items()}
    publish("learning", _targets(found), {"steps": arguments.steps, "evaluations (version, seconds, accuracy)": curves})
    _console.print(_table(found))


def _targets(found: dict[str, list[Figures]]) -> list[Target]:
    """What was expected: no loss at equal steps, ahead at equal time."""
    final = {mode: [one.evaluations[-1][2] for one in some] for mode, some in found.items()}
    noise = _half_width(final["sync"]) + _half_width(final["dora K=3"])
    difference = statistics.mean(final["dora K=3"]) - statistics.mean(final["sync"])
    time_ratio = statistics.median(
        sync.seconds / dora.seconds for sync, dora in zip(found["sync"], found["dora K=3"], strict=True)
    )
    return [
        at_least("dora K=3 - sync at equal steps, accuracy; minus the noise", -noise, difference),
        at_least("seconds of sync over dora K=3 for the same steps", 1.0, time_ratio),
        at_least("lowest final accuracy of dora K=3 over the seeds", 0.85, min(final["dora K=3"])),
    ]


def _half_width(values: Sequence[float]) -> float:
    """Of a 95% interval of the mean, by Student's t."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.2)
    return t * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def _bands(some: list[Figures]) -> tuple[Band, Band]:
    """Mean and 95% band over the seeds: against steps, and against the seeds' mean seconds."""
    columns = list(zip(*[one.evaluations for one in some], strict=True))
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
