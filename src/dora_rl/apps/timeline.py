"""One self-contained HTML page: who did what when, coloured by version, with the cause of every idle stretch.

The page needs nothing from the network. Activities are sampled to about the width of a screen, so that the page of a
large cluster stays small; the tables hold the exact sums.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from dora_rl.core.accounting import Activity, Segment
from dora_rl.core.labels import Label
from dora_rl.core.nouns import SECOND, Nanoseconds
from dora_rl.sim.run import Result, Timeline

_COLUMNS = 1200
_MOST_ROWS = 64
_MOST_MOVES = 2000


def write_timeline(path: Path, title: str, figures: dict[str, Any], results: dict[str, Result]) -> None:
    """Write the page for a set of simulated modes."""
    pages = {mode: _mode(result.timeline) for mode, result in results.items() if result.timeline is not None}
    data = json.dumps({"title": title, "figures": figures, "timelines": pages}, separators=(",", ":"))
    template = resources.files("dora_rl.apps").joinpath("timeline.html").read_text(encoding="utf-8")
    # `</` would end the script element early.
    path.write_text(template.replace("/*DATA*/null", data.replace("</", "<\\/")), encoding="utf-8")


def _mode(timeline: Timeline) -> dict[str, Any]:
    slots = list(timeline.slots)
    chosen = slots if len(slots) <= _MOST_ROWS else slots[:: -(-len(slots) // _MOST_ROWS)]
    rows = {slot: number for number, slot in enumerate(chosen)}
    moves = [
        [_seconds(when - timeline.start), rows[source], rows[target], count]
        for when, source, target, count in timeline.moves
        if when >= timeline.start and source in rows and target in rows
    ]
    return {
        "seconds": _seconds(timeline.end - timeline.start),
        "rows": [
            {"name": str(slot), "runs": _sample(timeline.slots[slot], timeline.start, timeline.end)} for slot in chosen
        ],
        "all_rows": len(slots),
        "trainer": _sample(timeline.trainer, timeline.start, timeline.end),
        "published": [
            [version, _seconds(when - timeline.start)]
            for version, when in timeline.published.items()
            if when >= timeline.start
        ],
        "moves": moves[:: max(1, len(moves) // _MOST_MOVES)],
    }


def _seconds(time: Nanoseconds) -> float:
    return round(time / SECOND, 2)


def _sample(segments: list[Segment], start: Nanoseconds, end: Nanoseconds) -> list[list[Any]]:
    """Runs of [columns, label, version, cause]: in each column, what took most of it."""
    width = (end - start) / _COLUMNS
    weights: list[dict[Activity, float]] = [{} for _ in range(_COLUMNS)]
    for segment in segments:
        if segment.end <= start or segment.start >= end:
            continue
        first = max(0, int((segment.start - start) / width))
        last = min(_COLUMNS - 1, int((segment.end - start) / width))
        for column in range(first, last + 1):
            left = start + column * width
            covered = min(segment.end, left + width) - max(segment.start, left)
            if covered > 0:
                weights[column][segment.activity] = weights[column].get(segment.activity, 0.0) + covered
    runs: list[list[Any]] = []
    for weight in weights:
        activity = max(weight, key=lambda it: weight[it]) if weight else Activity(Label.IDLE)
        cause = "" if activity.cause is None else str(activity.cause)
        if runs and runs[-1][1:] == [activity.label.value, activity.version, cause]:
            runs[-1][0] += 1
        else:
            runs.append([1, activity.label.value, activity.version, cause])
    return runs
