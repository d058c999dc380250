"""`dora-rl report`: writes a self-contained page about a run, from the files of its run directory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dora_rl.apps import run_reader
from dora_rl.apps.html_page import write_page
from dora_rl.apps.segments import natural, segments, slot_id
from dora_rl.apps.summary import ACCURACY, REWARD, Summary, occupancy_between, published_times, summarise, worker_id
from dora_rl.apps.summary_table import rows
from dora_rl.apps.timeline import drawn
from dora_rl.core.time_accounting import Segment, Timeline
from dora_rl.core.types import SECOND, Nanoseconds, StepId
from dora_rl.runtime.run_dir import RunDir

_BINS = 24
_SAMPLES = 12
_LONGEST = 4000
"""Characters shown of a sample's text."""


def report(run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.")]) -> None:
    """Write the report page of a run: curves, lengths, staleness, timeline, samples."""
    folder = RunDir.open(run)
    write_report(folder, summarise(folder))
    Console(soft_wrap=True).print(f"report: {folder.report}", highlight=False, markup=False)


def write_report(folder: RunDir, summary: Summary) -> None:
    """Write `report.html` into the run's folder."""
    metrics, facts, activity = (
        run_reader.read_metrics(folder),
        run_reader.read_facts(folder),
        run_reader.read_activity(folder),
    )
    timeline = run_timeline(activity, facts.published)
    settings = folder.settings()
    control = settings["control"]
    data = {
        "name": summary.name,
        "about": f"{settings['model']['path']} on {settings['data']['source']}: {control['groups_per_step']} groups "
        f"of {control['group_size']} per step, responses of at most {control['max_response_tokens']} tokens.",
        "figures": rows(summary),
        "curves": {"steps": curves(metrics, "version"), "seconds": curves(metrics, "time")},
        "occupancy": _occupancy(activity, metrics, facts),
        "lengths": _lengths(facts.lengths),
        "staleness": [[str(age), count, f"staleness {age}"] for age, count in summary.staleness.items()],
        "timeline": None if timeline is None else drawn(timeline),
        "lost": [
            [note["at"] / SECOND, note["who"], note["reason"]] for note in activity.notes if note["note"] == "lost"
        ],
        "slots": list(summary.slots.items()),
        "trainer": list(summary.trainer.items()),
        "samples": _samples(list(run_reader.lines(folder.samples))),
    }
    write_page(folder.report, "report.html", data)


# -- curves -----------------------------------------------------------------------------------------------------


def curves(metrics: run_reader.Metrics, x: str) -> dict[str, list[list[float]]]:
    """Curves over the version of each step, or over seconds."""
    steps, evaluations = metrics.steps.values(), metrics.evaluations.values()
    return {
        "reward": points(steps, x, REWARD),
        "accuracy": points(evaluations, x, ACCURACY),
        "rate": points(steps, x, "throughput/tokens_per_second"),
        "seconds": points(steps, x, "timing_s/step"),
    }


def _occupancy(
    activity: run_reader.ActivityLog, metrics: run_reader.Metrics, facts: run_reader.RunFacts
) -> list[list[float]]:
    """Occupancy in each step, from all windows: those written during a short step cover it badly."""
    found = occupancy_between(activity.windows, published_times(metrics, facts))
    return [[step + 1, round(share, 4)] for step, share in zip(facts.published, found, strict=True)]


def points(records: Iterable[dict[str, Any]], x: str, y: str) -> list[list[float]]:
    """A curve: the values that are finite, in the order of x."""
    found = [[one[x], round(one[y], 6)] for one in records if y in one and math.isfinite(one[y])]
    return sorted(found)


def _lengths(lengths: dict[int, list[int]]) -> dict[str, Any]:
    ranked = {step: sorted(some) for step, some in lengths.items()}
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    curves = {
        name: [[step + 1, percentile(some, share)] for step, some in ranked.items()] for name, share in shares.items()
    }
    return {**curves, "histogram": _histogram([length for some in lengths.values() for length in some])}


def percentile(ranked: list[int], share: float) -> int:
    """The smallest value that at least this share of the values does not exceed."""
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def _histogram(lengths: list[int]) -> list[list[Any]]:
    """Bins that grow by a constant factor, since lengths have a long tail."""
    if not lengths:
        return []
    low, high = max(1, min(lengths)), max(lengths)
    factor = max(1.01, (high / low) ** (1 / _BINS))
    tops = sorted({max(low, round(low * factor**number)) for number in range(1, _BINS + 1)} | {high})
    counts = Counter(next(top for top in tops if length <= top) for length in lengths)
    below = [0, *tops]
    return [[str(top), counts[top], f"{below[i] + 1} to {top} tokens"] for i, top in enumerate(tops) if top <= high]


# -- timeline ---------------------------------------------------------------------------------------------------


def run_timeline(activity: run_reader.ActivityLog, published: dict[StepId, Nanoseconds]) -> Timeline | None:
    """One row for each slot of each instance; the restarts of an instance share a row."""
    # A crash may lose a note; the ledger has all steps.
    versions = {note["version"]: note["at"] for note in activity.notes if note["note"] == "published"}
    versions |= {step + 1: at for step, at in published.items()}
    tracks: dict[str, list[run_reader.Window]] = {}
    for window in activity.windows:
        tracks.setdefault(worker_id(window.who) if window.who != "trainer" else "trainer", []).append(window)
    trainer = _in_order(tracks.pop("trainer", []))
    slots = {slot_id(name): _in_order(tracks[name]) for name in sorted(tracks, key=natural)}
    rows = [segments for segments in slots.values() if segments]
    if not rows:
        return None
    return Timeline(
        slots=slots,
        trainer=trainer,
        moves=[
            (note["at"], slot_id(worker_id(note["source"])), slot_id(worker_id(note["target"])), note["count"])
            for note in activity.notes
            if note["note"] == "moved"
        ],
        published=dict(sorted(versions.items())),
        bounds=[(note["at"], note["after"]) for note in activity.notes if note["note"] == "bound"],
        # The first version may be published before the first instance starts.
        start=min([*(row[0].start for row in rows), *versions.values()]),
        end=max(row[-1].end for row in rows),
    )


def _in_order(windows: list[run_reader.Window]) -> list[Segment]:
    return list(segments(sorted(windows, key=lambda it: it.start)))


# -- samples ----------------------------------------------------------------------------------------------------


def _samples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best and the worst response of the first, some middle and the last steps."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    count = min(len(steps), _SAMPLES // 2)
    chosen = [steps[number * (len(steps) - 1) // max(1, count - 1)] for number in range(count)]
    return [_shortened(one) for step in reversed(chosen) for one in _best_and_worst(by_step[step])]


def _best_and_worst(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ranked = sorted(samples, key=lambda it: -math.inf if it["reward"] is None else it["reward"])
    return [ranked[-1], ranked[0]] if len(ranked) > 1 else ranked


def _shortened(sample: dict[str, Any]) -> dict[str, Any]:
    def short(text: str) -> str:
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [{len(text) - _LONGEST} more characters]"

    return sample | {"prompt": short(sample["prompt"]), "response": short(sample["response"])}
