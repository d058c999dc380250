"""Mean staleness and speed with eager and with just-in-time admission, simulated and in real runs.

    python -m benchmarks.freshness                          # the simulated cases
    python -m benchmarks.freshness --runs --repeats 3       # real runs, interleaved

The same orchestrator applies both rules (`orchestrator.admission`). Beside the mean staleness stands the latency of
groups in steps: the mean staleness of groups that are admitted at any time of a step and never wait for the trainer.
Groups that are admitted at the beginning of a step can be fresher than that.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, Target, at_least, at_most, publish
from benchmarks.running import Figures, finished, means, read
from dora_rl.sim.presets import preset
from dora_rl.sim.run import Result, parse_variant, simulate

ROOT = Path(__file__).parent.parent
RULES = ("eager", "just_in_time")
NAME = "freshness"
LIMIT = 1800.0
"""Seconds after which a run has failed."""
console = Console(width=130)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A simulated case, and the aim for its mean staleness: what a prototype of just-in-time admission reached."""

    preset: str
    settings: tuple[str, ...] = ()
    staleness: float
    seeds: int = 1
    """Its figures are means over this many seeds: with small steps, one seed tells little about 1%."""


_LONG = "steps=100"
CASES = {
    "laptop, about balanced": Case(preset="laptop", settings=(_LONG,), staleness=2.13, seeds=5),
    "laptop, trainer.utilisation = 0.29": Case(
        preset="laptop", settings=(_LONG, "trainer.utilisation=0.29"), staleness=1.13, seeds=5
    ),
    "laptop, trainer.utilisation = 0.07": Case(
        preset="laptop", settings=(_LONG, "trainer.utilisation=0.07"), staleness=0.51, seeds=5
    ),
    "24 instances, B = 64": Case(
        preset="laptop",
        settings=("steps=40", "devices=26", "trainer_devices=2", "control.groups_per_step=64"),
        staleness=0.66,
    ),
    "paper-64": Case(preset="paper-64", staleness=0.61),
    "paper-128": Case(preset="paper-128", staleness=1.0),
    "longcat-4096": Case(preset="longcat-4096", settings=("steps=4", "warmup_steps=5"), staleness=2.34),
}
TRAINER_BINDS = 1.01
"""Step over bound with eager admission below which the trainer is the bottleneck of a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A real run."""

    config: Path
    settings: dict[str, object]


JOBS = {
    "quickstart": Job(
        config=ROOT / "examples" / "quickstart" / "quickstart.toml",
        settings={"control.steps": 60, "evaluation.every": 60, "logging.samples": 0},
    ),
    "chains, the trainer binds": Job(
        config=ROOT / "benchmarks" / "jobs" / "chains.toml",
        settings={"control.groups_per_step": 16, "control.steps": 60},
    ),
    "agents": Job(config=ROOT / "benchmarks" / "jobs" / "agents.toml", settings={"control.steps": 16}),
}


# -- simulated ----------------------------------------------------------------------------------------------------


def run(case: Case) -> dict[str, Any]:
    """The figures of a case, by admission rule."""
    found = {}
    for rule in RULES:
        results = []
        for seed in range(case.seeds):
            config = preset(case.preset, [*case.settings, f"control.admission={rule}", f"seed={seed}"])
            results.append(simulate(config, parse_variant("dora")))
        found[rule] = _figures(results)
    return found


def _figures(results: list[Result]) -> dict[str, Any]:
    """Means over the seeds."""

    def mean(values: Iterable[float], digits: int) -> float:
        return round(statistics.fmean(values), digits)

    lags = sorted({lag for one in results for lag in one.staleness})
    return {
        "seeds": len(results),
        "over_lower_bound": mean((one.over_lower_bound for one in results), 4),
        "tokens_per_second": mean((one.tokens_per_second for one in results), 1),
        "mean_staleness": mean((one.mean_staleness for one in results), 3),
        "latency_in_steps": mean((one.latency_in_steps for one in results), 3),
        "occupancy": mean((one.occupancy for one in results), 4),
        "staleness": {str(lag): mean((one.staleness.get(lag, 0.0) for one in results), 4) for lag in lags},
    }


def targets(cases: dict[str, Any]) -> list[Target]:
    """Step times are compared with the bound of their own batches, since the two rules train different batches."""
    found = []
    for name, rules in cases.items():
        new, old = rules["just_in_time"], rules["eager"]
        ratio = new["over_lower_bound"] / old["over_lower_bound"]
        found.append(at_most(f"{name}: step over bound, just in time / eager", 1.01, ratio))
        found.append(at_most(f"{name}: mean staleness", CASES[name].staleness, new["mean_staleness"]))
        if old["over_lower_bound"] < TRAINER_BINDS:
            latencies = new["mean_staleness"] / new["latency_in_steps"]
            found.append(at_most(f"{name}: mean staleness / latency in steps", 1.15, latencies))
    return found


# -- real ---------------------------------------------------------------------------------------------------------


def run_job(job: Job, rule: str) -> dict[str, Any]:
    """The figures of one run."""
    with finished(job.config, LIMIT, **job.settings, **{"control.admission": rule}) as folder:
        figures, latency = read(folder), means(folder, ("timing_s/group_latency",))
    return _of_run(figures, latency["timing_s/group_latency"])


def _of_run(figures: Figures, latency: float) -> dict[str, Any]:
    return {
        "tokens_per_second": round(figures.tokens_per_second, 1),
        "mean_staleness": round(sum(int(lag) * share for lag, share in figures.staleness.items()), 3),
        "latency_in_steps": round(latency / figures.step_seconds, 3),
        "occupancy": round(figures.occupancy, 4),
        "staleness": {lag: round(share, 4) for lag, share in figures.staleness.items()},
    }


def run_targets(runs: dict[str, Any]) -> list[Target]:
    """Medians of the repeats; speeds as the median of the ratios of pairs that ran one after the other."""
    found = []
    for name, rules in runs.items():
        new, old = rules["just_in_time"], rules["eager"]
        pairs = zip(new, old, strict=True)
        ratio = statistics.median(one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs)
        fresher = _median(new, "mean_staleness") / _median(old, "mean_staleness")
        found.append(at_least(f"run {name}: tokens/s, just in time / eager", 0.99, ratio))
        found.append(at_most(f"run {name}: mean staleness, just in time / eager", 1.0, fresher))
    return found


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(float(one[key]) for one in runs)


# -- tables -------------------------------------------------------------------------------------------------------


def show(rows: list[tuple[str, str, str, dict[str, Any]]], speed: str) -> None:
    """A table of (case, admission, speed, figures)."""
    table = Table(caption="latency: of groups, in steps")
    for column in ("case", "admission", speed, "mean staleness", "latency", "staleness"):
        table.add_column(column, justify="left" if column in ("case", "admission", "staleness") else "right")
    for name, rule, fast, one in rows:
        shares = "  ".join(f"{lag}:{share:.0%}" for lag, share in one["staleness"].items() if share >= 0.005)
        table.add_row(name, rule, fast, f"{one['mean_staleness']:.2f}", f"{one['latency_in_steps']:.2f}", shares)
    console.print(table)


def show_all(cases: dict[str, Any], runs: dict[str, Any]) -> None:
    show(
        [(name, rule, f"{one['over_lower_bound']:.3f}", one) for name, by in cases.items() for rule, one in by.items()],
        "step over bound",
    )
    rows = []
    for name, by in runs.items():
        for rule, repeats in by.items():
            middle = sorted(repeats, key=lambda one: float(one["mean_staleness"]))[len(repeats) // 2]
            rows.append((name, rule, f"{_median(repeats, 'tokens_per_second'):,.0f}", middle))
    if rows:
        show(rows, "tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*CASES, *JOBS], help="run these only; the file keeps its figures of the others"
    )
    parser.add_argument("--runs", action="store_true", help="real runs instead of the simulated cases")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of real runs")
    arguments = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    cases, runs = dict(kept.get("cases", {})), dict(kept.get("runs", {}))
    names = arguments.only or (JOBS if arguments.runs else CASES)
    for name in names:
        console.print(f"  {name}", highlight=False)
        if name in CASES:
            cases[name] = run(CASES[name])
            continue
        runs[name] = {rule: [] for rule in RULES}
        for _ in range(arguments.repeats):
            for rule in RULES:
                runs[name][rule].append(run_job(JOBS[name], rule))
                console.print(f"    {rule}: {runs[name][rule][-1]}", highlight=False)
    cases = {name: cases[name] for name in CASES if name in cases}
    runs = {name: runs[name] for name in JOBS if name in runs}
    show_all(cases, runs)
    publish(NAME, targets(cases) + run_targets(runs), {"cases": cases, "runs": runs})


if __name__ == "__main__":
    main()
