"""Tables, targets and plots of the learning study, from its recorded runs alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks import plots
from benchmarks.learning_analysis import (
    Interval,
    Run,
    at_equal_seconds,
    at_equal_steps,
    half_width,
    over_the_curve,
    paired,
    score,
    whole_curve,
)
from benchmarks.plots import Band
from benchmarks.report import Target, at_least, publish

if TYPE_CHECKING:
    from rich.console import Console

DOCS = Path(__file__).parent.parent / "docs"
BASE = "sync"
PLOTTED = ("sync", "dora K=1", "dora K=3", "dora K=7", "dora auto", "dora K=7 eager")
"""A plot with more lines is not readable."""
PLOTS = {"quickstart": "learning.svg", "medium": "learning-medium.svg", "verified": "learning-verified.svg"}
MEASURES = {"equal steps": at_equal_steps, "whole curve": over_the_curve, "equal seconds": at_equal_seconds}
PINNING = tuple((f"partial K={k}", f"dora K={k}{rule}") for k in (3, 7) for rule in (" eager", ""))
"""Arms with the same bound. Their realised staleness differs, so the table shows it."""
AIMS = {"dora K=3": -0.5, "dora K=7": -1.0}
"""Points that the mean difference to `sync` at equal steps may not fall below."""
SEEDS = 10
"""Number of seeds that the study asks for."""
Arms = dict[str, list[Run]]


def write(runs: Sequence[Run], console: Console) -> None:
    """Print the tables, and write `results/learning.json` and the plots."""
    targets: list[Target] = []
    figures: dict[str, Any] = {}
    for job in dict.fromkeys(one.job for one in runs):
        arms = _by_arm([one for one in runs if one.job == job])
        found = analyse(arms)
        figures[job] = found
        for table in (_arms_table(job, found), _differences_table(job, found), _pinning_table(job, found)):
            console.print(table)
        targets += targets_of(job, arms)
        draw(DOCS / PLOTS[job], arms)
    steps = sorted({one.steps for one in runs})
    commits = sorted({one.commit for one in runs})
    publish("learning", targets, {"steps": steps, "commits": commits, "runs": len(runs), "jobs": figures})


def analyse(arms: Arms) -> dict[str, Any]:
    """Figures of each arm, its differences to `sync`, and the differences of `partial` to `dora`, in points."""
    base = arms.get(BASE, [])
    return {
        "arms": {arm: _figures(some) for arm, some in arms.items()},
        "minus sync": {arm: _differences(some, base) for arm, some in arms.items() if arm != BASE},
        "pinning": [
            {
                "partial": one,
                "dora": other,
                "staleness": [_mean(arms[one], "staleness"), _mean(arms[other], "staleness")],
                "partial minus dora": _differences(arms[one], arms[other]),
            }
            for one, other in PINNING
            if one in arms and other in arms
        ],
    }


def targets_of(job: str, arms: Arms) -> list[Target]:
    """The aims of the study for one job."""
    found = []
    for arm, least in AIMS.items():
        difference = paired(arms.get(arm, []), arms.get(BASE, []), at_equal_steps)
        if difference is None:
            continue
        found.append(at_least(f"{job}: {arm} - sync at equal steps, mean points", least, difference.mean))
        if arm == "dora K=3" and difference.seeds > 1:
            found.append(at_least(f"{job}: upper end of the 95% interval of {arm} - sync", 0.0, difference.high))
        found.append(at_least(f"{job}: paired seeds of {arm} and sync", SEEDS, difference.seeds))
    return found


def _by_arm(runs: Sequence[Run]) -> Arms:
    return {arm: [one for one in runs if one.arm == arm] for arm in dict.fromkeys(one.arm for one in runs)}


def _figures(runs: list[Run]) -> dict[str, Any]:
    ages = sorted({age for one in runs for age in one.histogram}, key=int)
    names = dict.fromkeys(name for one in runs for name in one.means)
    return {
        "seeds": len(runs),
        "start": statistics.fmean(one.curve[0].accuracy for one in runs),
        "score": _interval(Interval.of([score(one.curve) for one in runs])),
        "lowest score": min(score(one.curve) for one in runs),
        "whole curve": statistics.fmean(whole_curve(one.curve) for one in runs),
        "seconds": _mean(runs, "seconds"),
        "tokens/s": _mean(runs, "tokens_per_second"),
        "staleness": _mean(runs, "staleness"),
        "histogram": {age: statistics.fmean(one.histogram.get(age, 0.0) for one in runs) for age in ages},
        "means": {name: statistics.fmean(one.means[name] for one in runs if name in one.means) for name in names},
    }


def _differences(runs: list[Run], others: list[Run]) -> dict[str, Any]:
    return {name: _interval(paired(runs, others, measure)) for name, measure in MEASURES.items()}


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    """As JSON, which has no infinity: the interval of a single seed is left out."""
    if interval is None:
        return None
    bounded = math.isfinite(interval.high)
    ends = (interval.low, interval.high) if bounded else (None, None)
    return {"mean": interval.mean, "low": ends[0], "high": ends[1], "seeds": interval.seeds}


def _mean(runs: list[Run], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in runs)


# -- tables and plots ---------------------------------------------------------------------------------------------


def _arms_table(job: str, found: dict[str, Any]) -> Table:
    table = _table(f"{job}: held-out accuracy, mean of the last three evaluations")
    for column in ("arm", "seeds", "start", "score", "lowest", "seconds", "tokens/s", "staleness", "histogram", "ESS"):
        table.add_column(column, justify="left" if column in ("arm", "histogram") else "right")
    for arm, one in found["arms"].items():
        ess = one["means"].get("off_policy/ess")
        table.add_row(
            arm,
            str(one["seeds"]),
            f"{one['start']:.1%}",
            _percent(one["score"]),
            f"{one['lowest score']:.1%}",
            f"{one['seconds']:.0f}",
            f"{one['tokens/s']:,.0f}",
            f"{one['staleness']:.2f}",
            "/".join(f"{100 * share:.0f}" for share in one["histogram"].values()),
            "" if ess is None else f"{ess:.3f}",
        )
    return table


def _differences_table(job: str, found: dict[str, Any]) -> Table:
    table = _table(f"{job}: points above sync, paired by seed, with 95% intervals")
    for column in ("arm", "seeds", *MEASURES):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, differences in found["minus sync"].items():
        steps = differences["equal steps"]
        count = "0" if steps is None else str(steps["seeds"])
        table.add_row(arm, count, *(_points(differences[measure]) for measure in MEASURES))
    return table


def _pinning_table(job: str, found: dict[str, Any]) -> Table:
    table = _table(f"{job}: points of partial above dora at the same K, paired by seed, with 95% intervals")
    for column in ("pair", "mean staleness", *MEASURES):
        table.add_column(column, justify="left" if column == "pair" else "right")
    for one in found["pinning"]:
        staleness = ", ".join(f"{value:.2f}" for value in one["staleness"])
        differences = (_points(one["partial minus dora"][measure]) for measure in MEASURES)
        table.add_row(f"{one['partial']} - {one['dora']}", staleness, *differences)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")


def _percent(interval: dict[str, Any]) -> str:
    half = "" if interval["high"] is None else f" ± {100 * (interval['high'] - interval['mean']):.1f}"
    return f"{100 * interval['mean']:.1f}{half}"


def _points(interval: dict[str, Any] | None) -> str:
    if interval is None:
        return ""
    ends = "" if interval["high"] is None else f" ({interval['low']:+.2f} to {interval['high']:+.2f})"
    return f"{interval['mean']:+.2f}{ends}"


def draw(path: Path, arms: Arms) -> None:
    """Mean accuracy and its 95% band over the seeds."""
    series = {arm: _bands(arms[arm]) for arm in PLOTTED if arm in arms}
    if series:
        plots.curves(path, "held-out accuracy, mean and 95% interval over the seeds", series)


def _bands(runs: list[Run]) -> tuple[Band, Band]:
    """Against steps, and against the mean of the seconds at which the seeds reach a step."""
    columns = list(zip(*(one.curve for one in runs), strict=True))
    means = [statistics.fmean(point.accuracy for point in column) for column in columns]
    widths = [half_width([point.accuracy for point in column]) if len(runs) > 1 else 0.0 for column in columns]
    steps = [float(column[0].version) for column in columns]
    seconds = [statistics.fmean(point.seconds for point in column) for column in columns]
    return Band(steps, means, widths), Band(seconds, means, widths)
