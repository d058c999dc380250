"""Analysis of the learning study: scores of runs, and paired differences between arms with 95% intervals.

- The score of a run is the mean of its last three evaluations, since one evaluation of 512 problems has a standard
  error of over a point. The mean of the whole curve is a second measure, which also counts how soon a run learns.
- Differences are taken between runs of one seed, which share the prompts and the held-out problems, so that what a
  seed does to both arms cancels out. Their interval is Student's t.
- At equal seconds, both runs of a pair are scored at the moment at which the faster of the two ends. A pair counts
  only if both runs had the same number of cores and began on a quiet machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

QUIET = 3.0
"""Load average at the beginning of a run above which its seconds are not compared: another run, or the tests, went on
beside it. A run that follows another one begins with a load of about 2."""
LAST = 3
"""Number of evaluations that a score averages."""
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 97.5% quantile of Student's t for 1 to 30 degrees of freedom."""


class Evaluation(NamedTuple):
    """One point of a learning curve."""

    version: int
    seconds: float
    """From the first published version to this one."""
    accuracy: float


Curve = Sequence[Evaluation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run of the study, as one line of its file."""

    job: str
    arm: str
    seed: int
    steps: int
    settings: dict[str, object]
    """What distinguishes the arm from the others, as dotted settings."""
    config: str
    """Digest of the job's config file."""
    commit: str
    cores: int
    load: float
    """Load average of the machine when the run began."""
    seconds: float
    curve: tuple[Evaluation, ...]
    staleness: float
    """Mean over the steps of the mean staleness of a step's groups."""
    histogram: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float
    means: dict[str, float] = field(default_factory=dict)
    """Means over the steps of some metrics; a metric that the run does not write is absent."""


class Interval(NamedTuple):
    """A mean and its 95% interval; the interval of a single value is unbounded."""

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        mean, half = statistics.fmean(values), half_width(values)
        return cls(mean, mean - half, mean + half, len(values))


def half_width(values: Sequence[float]) -> float:
    """Half the width of the 95% interval of the mean."""
    number = len(values)
    if number < 2:
        return math.inf
    return t_quantile(number - 1) * statistics.stdev(values) / math.sqrt(number)


def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t; beyond the table by the first terms of its expansion around the normal."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def score(curve: Curve) -> float:
    """Mean accuracy of the last evaluations."""
    return statistics.fmean(one.accuracy for one in curve[-LAST:])


def whole_curve(curve: Curve) -> float:
    """Mean accuracy over the steps, with straight lines between evaluations."""
    area = sum((b.version - a.version) * (a.accuracy + b.accuracy) / 2 for a, b in pairwise(curve))
    return area / (curve[-1].version - curve[0].version)


def score_at(curve: Curve, seconds: float) -> float:
    """The score that the run had at that moment: interpolated between the scores at its evaluations."""
    scores = [(one.seconds, score(curve[: index + 1])) for index, one in enumerate(curve)]
    if seconds <= scores[0][0]:
        return scores[0][1]
    for (begin, low), (end, high) in pairwise(scores):
        if seconds <= end:
            return low + (high - low) * (seconds - begin) / (end - begin)
    return scores[-1][1]


Difference = Callable[[Run, Run], float | None]
"""How much better one run is than the other of its pair; None if the two can't be compared."""


def at_equal_steps(one: Run, other: Run) -> float | None:
    return score(one.curve) - score(other.curve)


def over_the_curve(one: Run, other: Run) -> float | None:
    return whole_curve(one.curve) - whole_curve(other.curve)


def at_equal_seconds(one: Run, other: Run) -> float | None:
    if one.cores != other.cores or max(one.load, other.load) > QUIET:
        return None
    seconds = min(one.curve[-1].seconds, other.curve[-1].seconds)
    return score_at(one.curve, seconds) - score_at(other.curve, seconds)


def paired(runs: Sequence[Run], others: Sequence[Run], difference: Difference) -> Interval | None:
    """Mean difference over the seeds that both arms have run, in points; None if there are none."""
    by_seed = {other.seed: other for other in others}
    found = [difference(one, by_seed[one.seed]) for one in runs if one.seed in by_seed]
    points = [100 * value for value in found if value is not None]
    return Interval.of(points) if points else None
