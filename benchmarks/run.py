"""Whole runs in all modes: the same prompts and responses on the same machine, in interleaved repeats.

Rollout and training share the cores. The lower bound of a step is the sum of the trainer's time when it runs alone and
the time of the step's tokens at the engine's best rate on all cores; or the time of the longest trajectory divided by
K + 1, if that is longer. The best rate is that of the best batch size at the mean context of the job's tokens.

Where a second thread gains the trainer little, training uses fewer core-seconds beside rollout than alone. Therefore a
second bound is recorded, without a target: the fewest core-seconds that training and decoding each took or can take,
divided by the number of cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.decode import peak_rate
from benchmarks.report import RESULTS, Target, at_least, at_most, publish
from benchmarks.running import Figures, run
from dora_rl.apps.train import read_config

JOBS = Path(__file__).parent / "jobs"
STALENESS = 4
MODES: dict[str, dict[str, object]] = {
    "sync": {"control.mode": "sync"},
    "one_step_off": {"control.mode": "one_step_off"},
    "partial": {"control.mode": "partial", "control.max_staleness": STALENESS},
    "dora": {"control.mode": "dora", "control.max_staleness": STALENESS},
}
_console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", default="chains,agents")
    parser.add_argument("--bound", action="store_true", help="measure the bound again, for the recorded runs")
    arguments = parser.parse_args()
    jobs = arguments.jobs.split(",")
    targets: list[Target] = []
    figures: dict[str, Any] = {"cores": os.cpu_count(), "peak tokens/s of a core": {}}
    left = len(jobs) * arguments.repeats * len(MODES)
    for job in jobs:
        if arguments.bound:
            repeats = _on_record(job)
        else:
            repeats = _runs(job, arguments.repeats, left)
            left -= arguments.repeats * len(MODES)
        context = repeats[0]["sync"].context
        peak = peak_rate(read_config(JOBS / f"{job}.toml", []), context)
        figures["peak tokens/s of a core"][job] = peak
        _console.print(
            f"{job}: engine's best rate on one core at {context:.0f} tokens of context: {peak:,.0f} tokens/s"
        )
        targets += _targets(job, repeats, peak)
        figures.setdefault("bounds", {})[job] = _bounds(repeats, peak)
        figures[job] = [{mode: asdict(one) for mode, one in found.items()} for found in repeats]
        _show(job, repeats, peak)
        for name, value in figures["bounds"][job].items():
            _console.print(f"{job}: {name}: {value:.3f}")
    publish("run", targets, figures)


def _runs(job: str, count: int, left: int) -> list[dict[str, Figures]]:
    """Run all modes `count` times; `left` is the number of runs still to do in all jobs, for the progress message."""
    repeats: list[dict[str, Figures]] = []
    for repeat in range(count):
        # The order changes with each repeat, so that a drift of the machine favours no mode.
        order = list(MODES)[repeat:] + list(MODES)[:repeat]
        found: dict[str, Figures] = {}
        for mode in order:
            begin = time.monotonic()
            found[mode] = run(JOBS / f"{job}.toml", **MODES[mode])
            left -= 1
            seconds = time.monotonic() - begin
            _console.print(
                f"{job} {repeat + 1}/{count} {mode}: {found[mode].tokens_per_second:,.0f} tokens/s "
                f"({seconds:.0f} s, about {left * seconds / 60:.0f} min left)"
            )
        repeats.append(found)
    return repeats


def _on_record(job: str) -> list[dict[str, Figures]]:
    recorded = json.loads((RESULTS / "run.json").read_text())[job]
    return [{mode: Figures(**figures) for mode, figures in found.items()} for found in recorded]


def _targets(job: str, repeats: list[dict[str, Figures]], peak: float) -> list[Target]:
    def ratio(mode: str) -> float:
        return statistics.median(one["dora"].tokens_per_second / one[mode].tokens_per_second for one in repeats)

    return [
        at_least(f"{job}: dora over sync, trained tokens/s", 2.0, ratio("sync")),
        at_least(f"{job}: dora over one_step_off", 1.5, ratio("one_step_off")),
        at_least(f"{job}: dora over partial", 1.0, ratio("partial")),
        at_least(f"{job}: occupancy of dora", 0.9, statistics.median(one["dora"].occupancy for one in repeats)),
        at_most(
            f"{job}: dora's step over its lower bound",
            1.2,
            statistics.median(one["dora"].step_seconds / bound(one["sync"], peak) for one in repeats),
        ),
    ]


def bound(sync: Figures, peak: float, staleness: int = STALENESS) -> float:
    """Least seconds of a step, from the trainer's time, tokens and longest trajectory of a synchronous run."""
    rollout = sync.tokens / sync.steps / (peak * (os.cpu_count() or 1))
    return max(sync.trainer_busy + rollout, sync.longest / (staleness + 1))


def least_core_seconds(found: dict[str, Figures], peak: float) -> float:
    """Seconds of a step if all cores only computed what is necessary, at the lowest cost that was measured."""
    sync, cores = found["sync"], os.cpu_count() or 1
    beside = min(one.trainer_busy for mode, one in found.items() if mode != "sync")
    trainer = min(
        sync.trainer_busy * cores, beside * max(1, cores - 1)
    )  # beside rollout, the trainer leaves one core to it
    return (trainer + sync.tokens / sync.steps / peak) / cores


def _bounds(repeats: list[dict[str, Figures]], peak: float) -> dict[str, float]:
    least = [least_core_seconds(one, peak) for one in repeats]
    return {
        "seconds, one part after the other": statistics.median(bound(one["sync"], peak) for one in repeats),
        "seconds, by core-seconds": statistics.median(least),
        "dora's step over core-seconds": statistics.median(
            one["dora"].step_seconds / seconds for one, seconds in zip(repeats, least, strict=True)
        ),
        "sync's step over the bound": statistics.median(
            one["sync"].step_seconds / bound(one["sync"], peak) for one in repeats
        ),
    }


def _show(job: str, repeats: list[dict[str, Figures]], peak: float) -> None:
    table = Table(title=f"{job}: medians of {len(repeats)} repeats (spread)")
    for column in ("mode", "tokens/s", "of sync", "step s", "bound s", "occupancy", "live", "moved"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in MODES:
        some = [one[mode] for one in repeats]
        ratios = [one[mode].tokens_per_second / one["sync"].tokens_per_second for one in repeats]
        table.add_row(
            mode,
            f"{statistics.median(one.tokens_per_second for one in some):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{statistics.median(one.step_seconds for one in some):.3f}",
            f"{statistics.median(bound(one['sync'], peak) for one in repeats):.3f}",
            f"{statistics.median(one.occupancy for one in some):.0%}",
            f"{max(one.live_versions for one in some)}",
            f"{statistics.median(one.migrations for one in some):.0f}",
        )
    _console.print(table)


if __name__ == "__main__":
    main()
