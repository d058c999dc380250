"""How many untrained groups are wanted: as few as keep the trainer from waiting, each admitted as late as that allows.

The staleness bound allows (K + 1) * B untrained groups. When the trainer is the slower side, that many only grow stale,
and make the decode batches so large that the oldest trajectories, for which the trainer may wait, decode slowly.

*Just in time.* Number the untrained groups 0, 1, 2, ... A trainer that never waits, works T for a step and takes groups
during the first S of it, needs group n

    need(n) = (n // B) * T + (n % B) / B * S

after its step began. From admission to its last reward a group takes the latency l, so it is wanted from
need(n) - l - m * T after the begin of the step on. By Little's law the mean staleness is then about l / T + m, and its
floor is l / T. A step that takes longer than T asks for no more than one that takes T, so groups do not pile up before
a trainer that is lost or waits.

*The margin m* is the stock against variance, in steps. It begins with two standard deviations of a Poisson count of B
groups. Each step it shrinks by a fiftieth, and if groups were held back, it grows by three times the share of the step
that the trainer waited: in the long run that is 0.7 m percent of its time, and a margin that is too large halves in 35
steps. Near the balance the trainer waits more than that, and the margin grows until only the bound holds groups back.

*Enough* for busy instances are B * (l / T + 1.75) groups: those in generation, those of the step and a stock of three
quarters of a step. More would slow down the requests on busy instances, so they go only to instances with nothing to
do.

Invariants:
- what is wanted never overrides the bound: admission takes the lesser of the two;
- fewer than B untrained groups are held back until T after the begin of a step at the latest, so every step is fed;
- `wanted` and `opens_at` agree to the nanosecond: wanted(t) > n exactly if opens_at(n) is not None and <= t;
- all are functions of what was measured: the same events at the same times give the same numbers.
"""

from __future__ import annotations

import math

from dora_rl.core.types import SECOND, Nanoseconds

_STOCK = 0.75
"""Finished groups to have in stock, in steps, at the cost of the speed of others."""
_GROWTH = 3.0
"""Steps by which the margin grows for a step of waiting."""
_DECAY = 0.02
"""Share of the margin that each step takes away."""


class Pacing:
    """Measures how long steps and groups take and turns that into a number of groups."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self.margin = 2 / math.sqrt(groups_per_step)
        """m, in steps."""
        self._began: Nanoseconds = 0
        """When the step began."""
        self._step: Nanoseconds = 0
        """T, 0 until it is known."""
        self._taking: Nanoseconds = 0
        """S."""
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

    def record_step_time(self, step: float, taking: float) -> None:
        """The trainer works `step` seconds for a step, and takes groups during the first `taking` of them."""
        self._step = round(step * SECOND)
        self._taking = min(self._step, round(taking * SECOND))

    def record_held_back(self, now: Nanoseconds) -> None:
        """A group that the bound would allow is not wanted yet."""
        self._held_at = now

    def record_trainer_wait(self, share: float, limit: int) -> None:
        """The trainer waited for this share of the step that ends; the margin is at most `limit` steps."""
        # What was held back during the step, or so shortly before that it would have come in time, is what it lacked.
        held_back = self._held_at is not None and self._held_at >= self._began - (self._latency or 0)
        self.margin = min(self.margin * (1 - _DECAY) + (_GROWTH * share if held_back else 0), limit)

    def begin_step(self, now: Nanoseconds) -> None:
        """A step begins; the groups that finished since the last one give the latency."""
        self._began = now
        if self._latency_count:
            mean = self._latency_sum / self._latency_count
            self._latency = mean if self._latency is None else (self._latency + mean) / 2
            self._latency_sum = self._latency_count = 0

    # -- what follows from them -------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Times are known, so `wanted` and `opens_at` may be called."""
        return self._step > 0 and self._latency is not None

    def wanted(self, now: Nanoseconds) -> int:
        """How many untrained groups are wanted now."""
        elapsed = min(now - self._began, self._step)
        steps, rest = divmod(elapsed + self._lead(), self._step)
        taken = ((rest + 1) * self._groups_per_step - 1) // self._taking + 1 if self._taking else self._groups_per_step
        return steps * self._groups_per_step + min(self._groups_per_step, taken)

    def opens_at(self, groups: int) -> Nanoseconds | None:
        """When one more group than this many is wanted; None if not before another step begins."""
        steps, rest = divmod(groups, self._groups_per_step)
        wait = steps * self._step + rest * self._taking // self._groups_per_step - self._lead()
        return None if wait > self._step else self._began + max(0, wait)

    def enough(self) -> int:
        """How many untrained groups are enough for busy instances."""
        if not self.measured:
            return 2 * self._groups_per_step
        assert self._latency is not None
        return round(self._groups_per_step * (self._latency / self._step + 1 + _STOCK))

    def _lead(self) -> Nanoseconds:
        """How long before it is needed a group is admitted."""
        assert self._latency is not None
        return round(self._latency + self.margin * self._step)

    def check(self, now: Nanoseconds) -> None:
        """Assert that times are possible, and that `wanted` and `opens_at` agree."""
        assert 0 <= self._taking <= self._step, f"a step of {self._step} takes groups for {self._taking}"
        assert self.margin >= 0, f"the margin is {self.margin}"
        assert self._began <= now, "the step began in the future"
        if self.measured:
            wanted = self.wanted(now)
            opens = self.opens_at(wanted - 1)
            assert opens is not None, f"{wanted} groups are wanted, and the last of them never will be"
            assert opens <= now, f"{wanted} groups are wanted at {now}, the last of them from {opens} on"
