"""How many untrained groups are enough: as few as keep the trainer from waiting.

The staleness bound allows (K + 1) * B untrained groups. When the trainer is the slower side, that many only grow stale,
and make the batches so large that the oldest trajectories, for which the trainer may wait, decode slowly. By Little's
law the trainer is fed if the groups that are being generated number B * latency / step time; the groups of the step
itself and a stock against variance come on top. An instance with nothing to do gets new groups in any case, up to the
bound.
"""

from __future__ import annotations

from dora_rl.core.nouns import SECOND, Nanoseconds

_STOCK = 0.75
"""Finished groups to have in stock, in steps: lengths vary from step to step, and more only grow stale."""


class Pacing:
    """Measures how long groups take and turns that into a number of groups."""

    def __init__(self, groups_per_step: int) -> None:
        self._batch = groups_per_step
        self._wanted = 2 * groups_per_step
        self._latency: float | None = None
        self._sum = 0.0
        self._count = 0

    def finished(self, latency: Nanoseconds) -> None:
        """A group took so long from admission to its last reward."""
        self._sum += latency / SECOND
        self._count += 1

    def begin_step(self, busy_seconds: float | None) -> None:
        """A step begins; the trainer works so long for one."""
        if self._count:
            mean = self._sum / self._count
            self._latency = mean if self._latency is None else (self._latency + mean) / 2
            self._sum, self._count = 0.0, 0
        if busy_seconds and self._latency is not None:
            generating = self._latency / busy_seconds
            self._wanted = round(self._batch * (generating + 1 + _STOCK))

    def enough(self, staleness: int) -> int:
        """How many untrained groups are enough, under a bound."""
        return min((staleness + 1) * self._batch, self._wanted)
