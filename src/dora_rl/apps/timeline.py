"""Timelines for pages: the activities of slots and trainer, coloured by version, with the cause of all idle time.

Activities are sampled to the width of a few screens, so that the page of a large cluster or a long run stays small; the
tables have the exact sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.apps.html_page import write_page
from dora_rl.core.activities import ActivityLabel, IdleReason
from dora_rl.core.time_accounting import Activity, Segment, Timeline
from dora_rl.core.types import SECOND, Nanoseconds

if TYPE_CHECKING:
    from dora_rl.sim.run import Result  # only simulations need numpy

_COLUMNS = 1200
"""Minimum number of columns: the width of a screen."""
_MOST_COLUMNS = 12_000
_MOST_CELLS = 300_000
"""Over all rows: at most a few megabytes."""
_FINEST = SECOND // 50
_MOST_ROWS = 64
_MOST_MOVES = 2000


CAUSE_COLOURS = {
    IdleReason.STARTING: "#dddddd",
    IdleReason.NO_PROMPTS: "#ffaabb",
    IdleReason.TRAINER: "#ee8866",
    IdleReason.AHEAD: "#5b7a8c",
    IdleReason.STRAGGLERS: "#eedd88",
    IdleReason.PUBLISH: "#bbcc33",
    IdleReason.ROLLOUT: "#77aadd",
    IdleReason.DEADLINE: "#44bb99",
    IdleReason.REWARD: "#99ddff",
    IdleReason.TOOL: "#aaaa00",
    IdleReason.SPARE: "#f2f2ee",
    IdleReason.RESERVED: "#b79fd9",
    IdleReason.FINISHED: "#a8a8a8",
}
"""One colour for each cause of idle time, the same on all pages. The colours differ in hue and lightness, so that
colour-blind readers can distinguish them (nine are Paul Tol's light scheme)."""
LABEL_COLOURS = {
    ActivityLabel.DECODE: "hsl({hue} 62% 55%)",
    ActivityLabel.PREFILL: "hsl({hue} 62% 38%)",
    ActivityLabel.REPREFILL: "#b3202c",
    ActivityLabel.LOAD: "#7d8791",
    ActivityLabel.MIGRATE: "#f2b705",
    ActivityLabel.TRAIN: "hsl({hue} 34% 42%)",
    ActivityLabel.PUBLISH: "",
}
"""One colour for each activity, the same on all pages; `{hue}` is that of the version, and empty is the colour of text.
Neighbouring versions are the golden angle apart in hue."""


def palette() -> dict[str, dict[str, str]]:
    """The colours as pages get them."""
    return {
        "causes": {reason.value: colour for reason, colour in CAUSE_COLOURS.items()},
        "labels": {label.value: colour for label, colour in LABEL_COLOURS.items()},
    }


def write_timeline(path: Path, title: str, figures: dict[str, Any], results: dict[str, Result]) -> None:
    """Write the page for a set of simulated modes."""
    lines = {mode: drawn(result.timeline) for mode, result in results.items() if result.timeline is not None}
    write_page(path, "simulation.html", {"title": title, "figures": figures, "timelines": lines})


def drawn(timeline: Timeline) -> dict[str, Any]:
    """The data that `timeline.js` draws."""
    slots = list(timeline.slots)
    chosen = slots if len(slots) <= _MOST_ROWS else slots[:: -(-len(slots) // _MOST_ROWS)]
    rows = {slot: number for number, slot in enumerate(chosen)}
    columns = _columns(timeline.end - timeline.start, len(rows) + 1)
    moves = [
        [_seconds(when - timeline.start), rows[source], rows[target], count]
        for when, source, target, count in timeline.moves
        if when >= timeline.start and source in rows and target in rows
    ]
    return {
        **palette(),
        "begin": _seconds(timeline.start),
        "seconds": _seconds(timeline.end - timeline.start),
        "columns": columns,
        "rows": [
            {"name": str(slot), "runs": _sample(timeline.slots[slot], timeline.start, timeline.end, columns)}
            for slot in chosen
        ],
        "all_rows": len(slots),
        "trainer": _sample(timeline.trainer, timeline.start, timeline.end, columns),
        "published": [
            [version, _seconds(when - timeline.start)]
            for version, when in timeline.published.items()
            if when >= timeline.start
        ],
        "bounds": [
            [bound, _seconds(when - timeline.start)] for when, bound in timeline.bounds if when >= timeline.start
        ],
        "moves": moves[:: max(1, len(moves) // _MOST_MOVES)],
    }


def _seconds(time: Nanoseconds) -> float:
    return round(time / SECOND, 3)


def _columns(length: Nanoseconds, rows: int) -> int:
    return max(_COLUMNS, min(_MOST_COLUMNS, _MOST_CELLS // rows, length // _FINEST))


def _sample(segments: list[Segment], start: Nanoseconds, end: Nanoseconds, columns: int) -> list[list[Any]]:
    """Runs of [columns, label, version, cause]: for each column the longest activity; no label if there is none."""
    width = max(1, end - start) / columns
    weights: list[dict[Activity, float]] = [{} for _ in range(columns)]
    for segment in segments:
        if segment.end <= start or segment.start >= end:
            continue
        first = max(0, int((segment.start - start) / width))
        last = min(columns - 1, int((segment.end - start) / width))
        for column in range(first, last + 1):
            left = start + column * width
            covered = min(segment.end, left + width) - max(segment.start, left)
            if covered > 0:
                weights[column][segment.activity] = weights[column].get(segment.activity, 0.0) + covered
    runs: list[list[Any]] = []
    for weight in weights:
        cell = _cell(max(weight, key=lambda it: weight[it])) if weight else ["", None, ""]
        if runs and runs[-1][1:] == cell:
            runs[-1][0] += 1
        else:
            runs.append([1, *cell])
    return runs


def _cell(activity: Activity) -> list[Any]:
    return [activity.label.value, activity.version, "" if activity.cause is None else str(activity.cause)]
