"""The data of Training: all metrics of the steps and evaluations as curves, with as many points as were asked for."""

from __future__ import annotations

from typing import Any

from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.overview import points, thinned

_FIRST = (
    "reward/mean", "eval/held_out/accuracy", "loss", "entropy", "off_policy/kl", "mismatch_kl", "gradient_norm",
    "clip_fraction", "learning_rate", "off_policy/ess", "response_length/mean", "mismatch_gap",
)  # fmt: skip
"""The metrics that are shown first; the others follow by name."""
_NOT_METRICS = ("step", "version", "time", "evaluation")


def training(run: LiveRun, width: int) -> dict[str, Any]:
    """What Training shows; hold the run's lock."""
    run.refresh()
    records = [*run.metrics.steps.values(), *run.metrics.evaluations.values()]
    names = {name for record in records for name in record if name not in _NOT_METRICS}
    order = [name for name in _FIRST if name in names] + sorted(names - set(_FIRST))
    return {"curves": [[name, thinned(sorted(points(records, name)), width)] for name in order]}
