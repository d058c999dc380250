"""The data of Versions: what became of every admitted group, and when the unfinished ones are due."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dora_rl.apps.run_reader import open_ledger
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.overview import points, thinned
from dora_rl.core.types import Nanoseconds
from dora_rl.orchestrator.modes import MODES

_POINTS = 240
_OUTCOMES = """
SELECT count(*), count(step), count(failure), count(no_signal),
       sum(step IS NULL AND failure IS NULL AND no_signal IS NULL)
FROM groups
"""
_OPEN = """
SELECT id, version, admitted_at FROM groups WHERE step IS NULL AND failure IS NULL AND no_signal IS NULL
"""
_REQUESTS = """
SELECT groups.version, count(*), sum(trajectories.tokens IS NULL AND failed IS NULL),
       sum(trajectories.tokens IS NOT NULL AND reward IS NULL AND failed IS NULL), sum(failed IS NOT NULL)
FROM groups JOIN trajectories ON trajectories."group" = groups.id
WHERE step IS NULL AND failure IS NULL AND no_signal IS NULL GROUP BY 1 ORDER BY 1 DESC
"""


def versions(run: LiveRun) -> dict[str, Any]:
    """What Versions shows; hold the run's lock."""
    run.refresh()
    summary = run.summary()
    outcomes: tuple[int, ...] = (0, 0, 0, 0, 0)
    unfinished: list[tuple[int, int, Nanoseconds]] = []
    requests: list[tuple[int, ...]] = []
    if run.folder.ledger.exists():
        with open_ledger(run.folder) as ledger:
            ledger.execute("BEGIN")  # the three queries see the same state
            outcomes = tuple(count or 0 for count in ledger.execute(_OUTCOMES).fetchone())
            unfinished = ledger.execute(_OPEN).fetchall()
            requests = ledger.execute(_REQUESTS).fetchall()
    groups = Counter(version for _, version, _ in unfinished)
    names = ("admitted", "trained", "failed", "without_signal", "running")
    return {
        "conservation": dict(zip(names, outcomes, strict=True)),
        "newest": max((note["version"] for note in run.notes if note["note"] == "published"), default=None),
        "live": [
            {"version": version, "groups": groups[version], "requests": all_, "generating": generating,
             "scoring": scoring, "failed": failed}
            for version, all_, generating, scoring, failed in requests
        ],
        "ladder": ladder(run, unfinished, summary.steps),
        "staleness": list(summary.staleness.items()),
        "mean": summary.mean_staleness,
        "floor": summary.latency_in_steps,
        "bound": summary.max_staleness if summary.auto_bound is None else summary.auto_bound,
        "most_live": thinned(points(run.metrics.steps.values(), "rollout/live_versions"), _POINTS),
        "mean_staleness": thinned(points(run.metrics.steps.values(), "off_policy/trajectory_staleness"), _POINTS),
    }  # fmt: skip


def ladder(run: LiveRun, unfinished: list[tuple[int, int, Nanoseconds]], step: int) -> list[tuple[int, int, int]]:
    """For each deadline, a step: the unfinished groups that are due by then, and how many the steps until then take.

    The deadline of a group is its version plus the bound that was in force when it was admitted."""
    control = run.folder.settings()["control"]
    first = MODES[control["mode"]].staleness(control["max_staleness"])
    changes = [(note["at"], note["after"]) for note in run.notes if note["note"] == "bound"]
    due: Counter[int] = Counter()
    for _, version, admitted in unfinished:
        due[version + next((bound for at, bound in reversed(changes) if at <= admitted), first)] += 1
    rungs, sum_ = [], 0
    for deadline in sorted(due):
        sum_ += due[deadline]
        rungs.append((deadline, sum_, max(0, deadline - step + 1) * control["groups_per_step"]))
    return rungs
