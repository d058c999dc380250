"""The data of the Overview: is it learning, what limits it, what needs attention, speed, freshness, time left."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dora_rl.apps.advisories import advisories, binding, learning
from dora_rl.apps.run_reader import Metrics, RunFacts
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.summary import ACCURACY, RECENT, REWARD, shares
from dora_rl.core.time_accounting import occupancy
from dora_rl.core.types import SECOND

_POINTS = 240
"""Most points of a curve."""
_PARTS = 60


def overview(run: LiveRun) -> dict[str, Any]:
    """What the Overview shows; hold the run's lock."""
    run.refresh()
    facts, summary, metrics = run.facts(), run.summary(), run.metrics
    recent = list(metrics.steps.values())[-RECENT:]
    seconds = [one["timing_s/step"] for one in recent if "timing_s/step" in one]
    slots, trainer = recent_time(run, facts)
    last = max(facts.published.values(), default=0)
    now = run.span()[1]
    left = None
    if summary.state == "running" and summary.steps_asked is not None and seconds:
        left = statistics.fmean(seconds) * max(0, summary.steps_asked - summary.steps)
    ended = sum(len(some) for some in facts.lengths.values()) + sum(facts.failed.values())
    quiet = run.quiet_seconds() if summary.state == "running" else 0.0
    return {
        "name": run.name,
        "about": _about(run),
        "state": summary.state,
        "mode": summary.mode,
        "steps": summary.steps,
        "steps_asked": summary.steps_asked,
        "elapsed": now / SECOND,
        "left": left,
        "learning": msgspec.structs.asdict(learning(metrics, _samples(run))),
        "binding": msgspec.structs.asdict(binding(shares(slots), shares(trainer), occupancy(slots))),
        "advisories": [
            msgspec.structs.asdict(one)
            for one in advisories(
                summary, metrics, trajectories=ended, since_version=max(0, now - last) / SECOND, quiet=quiet
            )
        ],
        "slots": list(shares(slots).items()),
        "trainer": list(shares(trainer).items()),
        "occupancy": occupancy(slots),
        "tokens": summary.tokens,
        "tokens_per_second": _rate(recent) if recent else summary.tokens_per_second,
        "step_seconds": statistics.fmean(seconds) if seconds else None,
        "staleness": {
            "bound": summary.max_staleness,
            "auto": summary.auto_bound,
            "mean": summary.mean_staleness,
            "floor": summary.latency_in_steps,
            "histogram": list(summary.staleness.items()),
        },
        "best": summary.best,
        "failed": list(summary.failed.items()),
        "curves": {**curves(metrics), "occupancy": occupancy_curve(run, facts)},
    }


def recent_time(run: LiveRun, facts: RunFacts) -> tuple[Counter[str], Counter[str]]:
    """The time of slots and trainer by activity over the last steps; over the whole run if there are few."""
    times = sorted(facts.published.values())[-RECENT - 1 :]
    if len(times) < 3:
        return run.lanes.slot_time, run.lanes.trainer_time
    ends = [times[0], times[-1]]
    return run.lanes.slots_between(ends)[0], run.lanes.trainer_between(ends)[0]


def occupancy_curve(run: LiveRun, facts: RunFacts) -> list[list[float]]:
    """Occupancy between published versions, in a bounded number of parts: short steps have too few windows."""
    versions = sorted(facts.published.items())
    every = max(1, -(-len(versions) // _PARTS))
    edges = versions[::every]
    found = run.lanes.slots_between([at for _, at in edges]) if len(edges) > 1 else []
    return [[step + 1, round(occupancy(time), 4)] for (step, _), time in zip(edges[1:], found, strict=False)]


def curves(metrics: Metrics) -> dict[str, list[list[float]]]:
    """Curves over versions, with a bounded number of points."""
    steps, evaluations = metrics.steps.values(), metrics.evaluations.values()
    names = {
        "reward": REWARD,
        "length": "response_length/mean",
        "rate": "throughput/tokens_per_second",
        "staleness": "off_policy/trajectory_staleness",
        "seconds": "timing_s/step",
    }
    found = {curve: thinned(points(steps, name), _POINTS) for curve, name in names.items()}
    return found | {"accuracy": thinned(points(evaluations, ACCURACY), _POINTS)}


def points(records: Iterable[Mapping[str, Any]], name: str, x: str = "version") -> list[list[float]]:
    """[version, value] wherever there is a finite value."""
    return [[one[x], one[name]] for one in records if one.get(name) is not None and math.isfinite(one[name])]


def thinned(points: list[list[float]], most: int) -> list[list[float]]:
    """At most this many points: means of equal intervals."""
    if len(points) <= most:
        return [[x, _round(y)] for x, y in points]
    edges = [number * len(points) // most for number in range(most + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [[part[-1][0], _round(statistics.fmean(y for _, y in part))] for part in parts]


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _rate(recent: list[dict[str, Any]]) -> float:
    seconds = sum(one.get("timing_s/step", 0.0) for one in recent)
    return sum(one.get("batch/response_tokens", 0.0) for one in recent) / seconds if seconds else 0.0


def _samples(run: LiveRun) -> int:
    return int(run.folder.settings().get("evaluation", {}).get("samples", 1))


def _about(run: LiveRun) -> str:
    settings = run.folder.settings()
    control = settings["control"]
    model = str(settings["model"]["path"]).rstrip("/").rpartition("/")[2]
    return (
        f"{model} on {settings['data']['source']}: {control['groups_per_step']} groups of {control['group_size']} per "
        f"step, at most {control['max_response_tokens']} tokens per response"
    )
