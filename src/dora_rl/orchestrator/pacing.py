"""How many untrained groups are wanted: as few as keep the trainer from waiting.

The staleness bound allows (K + 1) * B untrained groups. When the trainer is the slower side, that many only grow stale,
and make the decode batches so large that the oldest trajectories, for which the trainer may wait, decode slowly.

*Just in time.* A step trains B groups, and all groups that are admitted before its version is published have the same
version, whether early or late in the step. So groups are admitted as soon as a version is published, and what matters
is only how many: B and a carry-over of c. The step trains the oldest B, and c are left for the next one; the mean
staleness is c / B. The carry-over feeds the trainer at the beginning of a step, until the first groups of the new
version come, and stands in for their stragglers at its end.

*How large c must be* is measured, not modelled. Each step shows which carry-over would have been just enough: the one
in force, less the finished groups that the trainer could always have done without, plus B times the share of the step
that it waited. Their mean and standard deviation are estimated, and c is set so that, if they were normal, the trainer
would wait for a quarter of a percent of its time. A step in which the trainer waited although nothing was held back
shows only that rollout is slow, and counts for nothing. Near the balance the trainer waits more than intended, and c
grows until only the bound holds groups back.

*While the trainer waits*, what is wanted grows by B per step time T: if those that it waits for are slow, others are
wanted in their place, in the end all that the bound allows.

*Enough* for busy instances are B * (l / T + 1.75) groups, with l the mean latency of groups: those in generation, those
of the step and a stock of three quarters of a step. More would slow down the requests on busy instances, so they go
only to instances with nothing to do. Before the times are known, two steps are enough for all.

Invariants:
- what is wanted never overrides the bound: admission takes the lesser of the two;
- B groups are always wanted, so every step is fed;
- `wanted` and `opens_at` agree to the nanosecond: if the trainer goes on as it does now, wanted(t) > n exactly if
  opens_at(n) is not None and <= t;
- all are functions of what was measured: the same events at the same times give the same numbers. Only operations that
  are exact on every machine are used (no logarithms), since a run may be resumed on another one.
"""

from __future__ import annotations

import itertools
import math

from dora_rl.core.types import SECOND, Nanoseconds

_STOCK = 0.75
"""Finished groups to have in stock, in steps, at the cost of the speed of others."""
_ALLOWED_WAIT = 0.0025
"""Share of its time for which the trainer may wait because the carry-over is small, if what is needed is normal. Its
tail is heavier than that, so the trainer waits about three times as long."""
_TIMES_WEIGHT = 0.25
"""Weight of the last step in T and l: they drift as lengths grow, and vary from batch to batch."""
_FALL, _RISE = 0.2, 0.4
"""Weight of the last step in the mean of what is needed, if it needed less and if it needed more: too small a
carry-over costs time, too large a one only freshness."""
_VARIANCE_WEIGHT = 0.1
"""Weight of the last step in the variance, which needs more steps."""
_NORMAL_LOSS = ((0.0, 0.3989), (0.5, 0.1978), (1.0, 0.0833), (1.5, 0.0293), (2.0, 0.0085), (2.5, 0.0020), (3.0, 0.0004))
"""Pairs (z, E[max(0, X - z)]) of a standard normal X."""


class Pacing:
    """Measures how long steps and groups take and how many groups the trainer needs."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self.carry_over = 1.0
        """c / B."""
        self._samples = 0
        """Number of steps that have shown which carry-over they needed."""
        self._needed = 1.0
        """Mean of what they needed."""
        self._variance = 0.25 / groups_per_step
        self._last: float | None = None
        """What the last step needed."""
        self._spare: int | None = None
        """The fewest groups that the trainer could have done without since the step began."""
        self._began: Nanoseconds = 0
        """When the step began."""
        self._waited: Nanoseconds = 0
        """How long the trainer has waited for groups since then, without the present wait."""
        self._waits_since: Nanoseconds | None = None
        self._steps = 0
        self._step: Nanoseconds = 0
        """T, how long the trainer works for a step; 0 until it is known."""
        self._latency: float | None = None
        """l, in nanoseconds."""
        self._latency_sum = 0
        """Sum of the latencies since the step began."""
        self._latency_count = 0
        self._held_at: Nanoseconds | None = None
        """When a group was last held back."""

    # -- measurements -----------------------------------------------------------------------------------------

    def record_latency(self, latency: Nanoseconds) -> None:
        """A group took this long from admission to its last reward."""
        self._latency_sum += latency
        self._latency_count += 1

    def record_held_back(self, now: Nanoseconds) -> None:
        """A group that the bound would allow is not wanted yet."""
        self._held_at = now

    def record_spare(self, groups: int) -> None:
        """The trainer has this many finished groups more than it can start on now."""
        self._spare = groups if self._spare is None else min(self._spare, groups)

    def trainer_waits(self, now: Nanoseconds, *, waits: bool) -> None:
        """The trainer waits for groups from now on, or no longer."""
        if self._waits_since is not None:
            self._waited += now - self._waits_since
        self._waits_since = now if waits else None

    def end_step(self, seconds: float, bound: int) -> None:
        """A step ends for which the trainer worked this long; the staleness bound is the largest carry-over."""
        if self.measured and seconds:
            self._adapt(self._waited / (seconds * SECOND), bound)
        self._steps += 1
        self._step += round(max(_TIMES_WEIGHT, 1 / self._steps) * (seconds * SECOND - self._step))

    def begin_step(self, now: Nanoseconds) -> None:
        """A step begins; the groups that finished since the last one give the latency."""
        self._began = now
        self._waited = 0
        self._waits_since = None
        self._spare = None
        if self._latency_count:
            mean = self._latency_sum / self._latency_count
            before = mean if self._latency is None else self._latency
            self._latency = before + max(_TIMES_WEIGHT, 1 / max(1, self._steps)) * (mean - before)
            self._latency_sum = self._latency_count = 0

    def _adapt(self, waited: float, bound: int) -> None:
        """Learn from a step of which the trainer waited this share."""
        spare = (self._spare or 0) / self._groups_per_step
        # What was held back during the step, or so shortly before that it would have come in time, is what it lacked.
        held_back = self._held_at is not None and self._held_at >= self._began - (self._latency or 0)
        if waited > spare and not held_back:
            return
        # There may be more groups than the carry-over asked for, as when it has just shrunk.
        needed = max(0.0, self.carry_over + waited - spare)
        self._samples += 1
        error = needed - self._needed
        self._needed += max(_RISE if error > 0 else _FALL, 1 / (self._samples + 1)) * error
        if self._last is not None:
            # Half the squared difference of two steps: it sees the variance, and not a drift of the mean.
            self._variance += _VARIANCE_WEIGHT * ((needed - self._last) ** 2 / 2 - self._variance)
        self._last = needed
        deviation = math.sqrt(self._variance)
        self.carry_over = min(self._needed + _deviations_for(deviation) * deviation, bound)

    # -- what follows from them -------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Times are known."""
        return self._step > 0 and self._latency is not None

    @property
    def step_seconds(self) -> float | None:
        """T in seconds; None until it is known."""
        return self._step / SECOND if self._steps else None

    def wanted(self, now: Nanoseconds) -> int:
        """How many untrained groups are wanted now."""
        if not self.measured:
            return self.enough()
        waited = self._waited + (0 if self._waits_since is None else now - self._waits_since)
        return self._base() + waited * self._groups_per_step // self._step

    def opens_at(self, groups: int, now: Nanoseconds) -> Nanoseconds | None:
        """When one more group than this many is wanted; None if not unless something else happens before."""
        if self.wanted(now) > groups:
            return now
        if self._waits_since is None or not self.measured:
            return None
        missing = groups + 1 - self._base()
        return self._waits_since + -(-missing * self._step // self._groups_per_step) - self._waited

    def _base(self) -> int:
        """Groups that are wanted while the trainer does not wait."""
        return self._groups_per_step + math.ceil(self.carry_over * self._groups_per_step)

    def enough(self) -> int:
        """How many untrained groups are enough for busy instances."""
        if not self.measured:
            return 2 * self._groups_per_step
        assert self._latency is not None
        return round(self._groups_per_step * (self._latency / self._step + 1 + _STOCK))

    def check(self, now: Nanoseconds) -> None:
        """Assert that times are possible, and that `wanted` and `opens_at` agree."""
        assert self.carry_over >= 0, f"the carry-over is {self.carry_over}"
        assert self._began <= now, "the step began in the future"
        assert 0 <= self._waited <= now - self._began, f"the trainer waited {self._waited} of {now - self._began}"
        if self.measured:
            wanted = self.wanted(now)
            opens = self.opens_at(wanted - 1, now)
            assert opens is not None, f"{wanted} groups are wanted, and the last of them never will be"
            assert opens <= now, f"{wanted} groups are wanted at {now}, the last of them from {opens} on"


def _deviations_for(deviation: float) -> float:
    """How many standard deviations of stock let the trainer wait for the allowed share of its time."""
    loss = _ALLOWED_WAIT / deviation if deviation else math.inf
    for (lower, more), (upper, less) in itertools.pairwise(_NORMAL_LOSS):
        if loss >= more:
            return lower
        if loss > less:
            return lower + (upper - lower) * (more - loss) / (more - less)
    return _NORMAL_LOSS[-1][0]
