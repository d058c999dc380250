"""The page of `dora-rl compare`: curves of all runs in one chart each, their results, and the settings that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.apps import run_reader
from dora_rl.apps.html_page import write_page
from dora_rl.apps.report import curves
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.apps.summary import Summary

_STALENESS = re.compile(r"off_policy/staleness_(\d+)")
_MOST_POINTS = 400
"""Most points of a curve: more than a chart has pixels for would only make the page larger."""


def write_comparison(
    path: Path,
    runs: Sequence[tuple[str, Path, Summary]],
    settings: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
) -> None:
    """Write the page; `runs` are titles, folders and summaries in the order of the columns of both tables."""
    data = {
        "about": "Step n publishes version n + 1. Seconds are those of each run's own clock.",
        "runs": [_run(title, RunDir.open(folder), summary) for title, folder, summary in runs],
        "settings": settings,
        "results": results,
    }
    write_page(path, "compare.html", data)


def _run(title: str, folder: RunDir, summary: Summary) -> dict[str, Any]:
    metrics = run_reader.read_metrics(folder)
    whole = sum(summary.staleness.values()) or 1
    return {
        "name": title,
        "curves": {
            by: {
                name: thinned(points)
                for name, points in (curves(metrics, x) | {"staleness": _staleness(metrics, x)}).items()
            }
            for by, x in (("versions", "version"), ("seconds", "time"))
        },
        "ages": [[age, count / whole] for age, count in summary.staleness.items()],
    }


def _staleness(metrics: run_reader.Metrics, x: str) -> list[list[float]]:
    """The mean staleness of the groups of each step."""
    found = [(step[x], mean_staleness(step)) for step in metrics.steps.values()]
    return [[at, round(mean, 4)] for at, mean in found if mean is not None]


def mean_staleness(figures: Mapping[str, Any]) -> float | None:
    """The mean staleness of the groups of a step, from their shares; None if they were not recorded."""
    shares = [(int(name[1]), value) for key, value in figures.items() if (name := _STALENESS.fullmatch(key))]
    whole = sum(share for _, share in shares)
    return sum(age * share for age, share in shares) / whole if whole else None


def thinned(points: Sequence[list[float]]) -> list[list[float]]:
    """At most a fixed number of points, evenly chosen, with the first and the last."""
    most = _MOST_POINTS
    if len(points) <= most:
        return list(points)
    return [points[number * (len(points) - 1) // (most - 1)] for number in range(most)]
