"""Summarises a whole run, however often it was resumed, from the files of its run directory.

The table at the end of a run, its report and `dora-rl runs` all show these values.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dora_rl.apps import run_reader
from dora_rl.core.activities import WORK, IdleReason
from dora_rl.core.time_accounting import NOT_COUNTED, activity_name, occupancy
from dora_rl.core.types import SECOND, Nanoseconds, Record, StepId, Version
from dora_rl.orchestrator.modes import MODES
from dora_rl.runtime.run_dir import RunDir

STARTING = f"idle: {IdleReason.STARTING.value}"
ACCURACY = "eval/held_out/accuracy"
REWARD = "reward/mean"
_NORMAL = 1.959964
"""The middle 95% of a normal distribution lie within this many standard deviations."""
RECENT = 10
"""Number of steps over which rates and the time left are averaged."""


class RunProgress(Record, frozen=True, kw_only=True):
    """The progress of a run."""

    name: str
    mode: str
    max_staleness: int
    """The largest staleness bound, unless the run was resumed with another one."""
    auto_bound: int | None
    """The bound in force, if the run chooses it."""
    steps: int
    steps_asked: int | None
    """None: the run ends with its prompts."""
    state: run_reader.State
    seconds: float
    """From the first published version to the last."""
    tokens: int
    """Response tokens trained."""
    tokens_per_second: float
    rewards: tuple[float, float] | None
    """Mean reward of the first and of the last step."""
    accuracy: tuple[tuple[Version, float], tuple[Version, float]] | None
    """Held-out accuracy of the first and of the last version evaluated."""


class Summary(RunProgress, frozen=True, kw_only=True):
    """All values in the summary of a run."""

    step_seconds: float
    """Median."""
    occupancy: float
    slots: dict[str, float]
    """Shares of the slots' time by activity, idle time as `idle: cause`, largest first."""
    trainer: dict[str, float]
    """Shares of the trainer's time."""
    staleness: dict[int, int]
    """Trained groups by staleness."""
    mean_staleness: float | None
    """Over the trained groups; None if there are none."""
    best: tuple[Version, float] | None
    """The version with the highest held-out accuracy, the first of several, with its accuracy."""
    latency_in_steps: float | None
    """Mean latency of groups, from admission to their last reward, over the mean time of a step. By Little's law this
    is the mean staleness of groups that are admitted at any time of a step and never wait for the trainer."""
    most_live: int
    """The most versions that generated at a time."""
    moved: int
    """Requests that were moved."""
    reprefilled: int
    """Tokens whose KV was lost and computed again."""
    gap: float | None
    """Mean difference between the engine's and the trainer's log-probs of a token under the same version."""
    alarms: dict[StepId, float]
    """Steps in which that exceeded `mismatch.warn`, with the difference."""
    failed: dict[str, int]
    """Failed trajectories by reason."""
    without_signal: dict[float, int]
    """Groups that ended without signal and were replaced, by the reward of their trajectories."""
    groups: int
    """Groups that were admitted."""
    ledger_share: float
    """Share of the run's time spent on writing the ledger."""
    restarts: dict[str, int]
    """Lost processes by worker id."""
    policy: Path | None
    """Newest policy folder."""


def progress(folder: RunDir) -> RunProgress:
    """The progress of the run in this folder; quick, however long the run is."""
    return _progress(folder, run_reader.read_metrics(folder), run_reader.read_facts(folder))


def summarise(folder: RunDir) -> Summary:
    """The summary of the run in this folder."""
    activity = run_reader.read_activity(folder)
    return summary_of(
        folder,
        run_reader.read_metrics(folder),
        run_reader.read_facts(folder),
        totals(activity.windows),
        activity.notes,
    )


def summary_of(
    folder: RunDir,
    metrics: run_reader.Metrics,
    facts: run_reader.RunFacts,
    time: tuple[Counter[str], Counter[str]],
    notes: Sequence[dict[str, Any]],
) -> Summary:
    """The summary from what was read of the run; `time` is what `totals` gives."""
    slots, trainer = time
    figures = metrics.steps.values()
    times = published_times(metrics, facts)
    policies = run_reader.policies(folder)
    return Summary(
        **msgspec.structs.asdict(_progress(folder, metrics, facts)),
        step_seconds=statistics.median(_differences(times)) / SECOND if times[1:] else 0.0,
        occupancy=occupancy(slots),
        slots=shares(slots),
        trainer=shares(trainer),
        staleness=dict(sorted(facts.staleness.items())),
        mean_staleness=_mean_staleness(facts.staleness),
        best=best_version(metrics.evaluations),
        latency_in_steps=_latency_in_steps(figures),
        most_live=round(max((one.get("rollout/live_versions", 0.0) for one in figures), default=0)),
        moved=facts.moved,
        reprefilled=round(sum(one.get("rollout/reprefilled_tokens", 0.0) for one in figures)),
        gap=_mean(one["mismatch_gap"] for one in figures if "mismatch_gap" in one),
        alarms={note["step"]: note["gap"] for note in notes if note["note"] == "mismatch"},
        failed=dict(facts.failed.most_common()),
        without_signal=dict(facts.without_signal.most_common()),
        groups=facts.groups,
        ledger_share=metrics.ledger_seconds / (times[-1] / SECOND) if times[1:] else 0.0,
        restarts=dict(Counter(worker_id(note["who"]) for note in notes if note["note"] == "lost")),
        policy=policies[max(policies)] if policies else None,
    )


def _progress(folder: RunDir, metrics: run_reader.Metrics, facts: run_reader.RunFacts) -> RunProgress:
    control = folder.settings()["control"]
    times = published_times(metrics, facts)
    seconds = (times[-1] - times[0]) / SECOND if times else 0.0
    tokens = sum(sum(facts.lengths.get(step, ())) for step in facts.published)
    figures = list(metrics.steps.values())
    start, auto = MODES[control["mode"]].staleness(control["max_staleness"]), control["max_staleness"] == "auto"
    return RunProgress(
        name=folder.path.resolve().name,
        mode=control["mode"],
        max_staleness=control["max_staleness_cap"] if auto else start,
        auto_bound=round(figures[-1].get("off_policy/bound", start) if figures else start) if auto else None,
        steps=len(facts.published),
        steps_asked=control["steps"],
        state=_state(folder, facts, control["steps"]),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        rewards=(figures[0][REWARD], figures[-1][REWARD]) if figures else None,
        accuracy=_first_and_last(metrics.evaluations),
    )


def published_times(metrics: run_reader.Metrics, facts: run_reader.RunFacts) -> list[Nanoseconds]:
    """When the first version was published, and the version of each step."""
    ends = sorted(facts.published.values())
    if not ends:
        return []
    first = metrics.steps.get(min(facts.published), {}).get("timing_s/step", 0.0)
    return [ends[0] - round(first * SECOND), *ends]


def totals(windows: Iterable[run_reader.Window]) -> tuple[Counter[str], Counter[str]]:
    """Time of all slots and of the trainer by activity, idle time as `idle: cause`."""
    slots: Counter[str] = Counter()
    trainer: Counter[str] = Counter()
    for window in windows:
        account = trainer if window.who == "trainer" else slots
        for label, _, cause, spent in window.shares:
            account[activity_name(label, cause)] += spent
    return slots, trainer


def occupancy_between(windows: Iterable[run_reader.Window], times: list[Nanoseconds]) -> list[float]:
    """Occupancy between consecutive times, as if the work of a window were spread evenly over it."""
    rates: dict[Nanoseconds, list[float]] = {}
    for window in windows:
        if window.who == "trainer" or window.end <= window.start:
            continue
        work = whole = 0
        for label, _, cause, spent in window.shares:
            work += spent if label in WORK else 0
            whole += spent if activity_name(label, cause) not in NOT_COUNTED else 0
        for at, sign in ((window.start, 1), (window.end, -1)):
            rate = rates.setdefault(at, [0.0, 0.0])
            rate[0] += sign * work / (window.end - window.start)
            rate[1] += sign * whole / (window.end - window.start)
    sums = [[0.0, 0.0] for _ in times]
    worked = wholly = 0.0
    for before, after in itertools.pairwise(sorted({*rates, *times})):
        worked += rates[before][0] if before in rates else 0.0
        wholly += rates[before][1] if before in rates else 0.0
        which = bisect.bisect_right(times, before) - 1
        if which >= 0:
            sums[which][0] += worked * (after - before)
            sums[which][1] += wholly * (after - before)
    return [work / whole if whole > 1 else 0.0 for work, whole in sums[:-1]]


def shares(time: Mapping[str, Nanoseconds]) -> dict[str, float]:
    """Each label's share, largest first."""
    whole = max(1, sum(time.values()))
    return {label: spent / whole for label, spent in Counter(dict(time)).most_common()}


def worker_id(who: str) -> str:
    """The id without the restart number: `i0/0` for `i0.2/0`, `i0` for `i0.2`."""
    name, slash, slot = who.partition("/")
    return name.rpartition(".")[0] + slash + slot if "." in name else who


def _first_and_last(evaluations: dict[Version, dict[str, Any]]) -> Any:
    if not evaluations:
        return None
    return tuple((version, evaluations[version][ACCURACY]) for version in (min(evaluations), max(evaluations)))


def best_version(evaluations: Mapping[Version, Mapping[str, Any]]) -> tuple[Version, float] | None:
    """The version with the highest held-out accuracy, with its accuracy; of several, the one with the fewest steps."""
    scores = {version: result[ACCURACY] for version, result in evaluations.items()}
    return max(scores.items(), key=lambda one: (one[1], -one[0]), default=None)


def wilson(mean: float, count: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share that was measured on `count` independent responses."""
    square = _NORMAL**2 / count
    middle = (mean + square / 2) / (1 + square)
    half = _NORMAL / (1 + square) * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def _latency_in_steps(figures: Iterable[dict[str, Any]]) -> float | None:
    measured = [one for one in figures if "timing_s/group_latency" in one and "timing_s/step" in one]
    seconds = sum(one["timing_s/step"] for one in measured)
    return sum(one["timing_s/group_latency"] for one in measured) / seconds if seconds else None


def _mean_staleness(groups: Mapping[int, int]) -> float | None:
    count = sum(groups.values())
    return sum(age * some for age, some in groups.items()) / count if count else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _differences(times: list[Nanoseconds]) -> list[Nanoseconds]:
    return [after - before for before, after in itertools.pairwise(times)]


def _state(folder: RunDir, facts: run_reader.RunFacts, asked: int | None) -> run_reader.State:
    if run_reader.is_running(folder):
        return "running"
    enough = asked is not None and len(facts.published) >= asked
    return "finished" if enough or (facts.drained and not facts.open_groups) else "stopped"
