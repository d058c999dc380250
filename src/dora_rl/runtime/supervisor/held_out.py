"""Held-out prompts: the problems of evaluations, the numbers of their trajectories, and what is evaluated already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.core.errors import UserError
from dora_rl.core.types import TrajectoryId, Version
from dora_rl.envs.data import Dataset, Problem, load

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig

_FIRST = 1 << 48
"""Trajectories of evaluations are numbered from here: no run gets this far, so they draw other random numbers."""


def first_trajectory(version: Version, count: int) -> TrajectoryId:
    """The first of the `count` trajectories of a version's evaluation; no other evaluation has the same ones."""
    return _FIRST + version * count


def held_out_accuracy(metrics: Path) -> dict[Version, float]:
    """Accuracy of the versions whose evaluation is complete, from the metrics that a run has written."""
    if not metrics.exists():
        return {}
    records = [json.loads(line) for line in metrics.read_bytes().splitlines() if line.startswith(b'{"evaluation"')]
    return {record["evaluation"]: record["eval/held_out/accuracy"] for record in records}


def held_out_problems(config: RunConfig, base: Path, dataset: Dataset | None = None) -> Sequence[Problem]:
    """The problems of evaluations; `dataset` is the run's own data, if it is loaded already."""
    if config.evaluation.data is not None:
        problems = load(config.evaluation.data, base).train
    else:
        problems = (dataset or load(config.data, base)).held_out
    if not problems:
        raise UserError("there are no held-out prompts: set data.held_out, or evaluation.data to a source of its own")
    return problems
