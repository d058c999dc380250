"""Which finished groups a step may take: earliest deadline first, and only while the older ones still fit.

Step n takes B groups. Call `left(d)` the untrained groups with deadline <= d that the step leaves behind; they must
fit into the steps n+1 .. d, that is, number at most (d - n) * B, for every d >= n. Then no group ever misses its
deadline, in whatever order groups finish (the proof is in docs/architecture.md). A group's deadline is fixed at its
admission: its version + the bound in force then. The rule knows nothing but deadlines, so it holds while the bound
changes.

Groups are taken one at a time, as they finish. With `taken` groups in the batch so far, the batch can still meet the
rule for d if the room left in it is enough for what must be trained before d; that is the same as

    taken with deadline > d  <=  B - need(d),      need(d) = untrained with deadline <= d - (d - n) * B

so a young group is refused exactly while its room in the batch belongs to an older one that still runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.core.types import StepId


class StepRule:
    """The rule for one step; it reads the counts of the group table."""

    __slots__ = ("_size", "_step", "_taken", "count")

    def __init__(self, step: StepId, size: int) -> None:
        self._step = step
        self._size = size
        self._taken: dict[StepId, int] = {}
        """Groups in the batch, by deadline."""
        self.count = 0
        """Groups in the batch."""

    def blocker(self, deadline: StepId, untrained: Mapping[StepId, int]) -> StepId | None:
        """None if a group with this deadline may join the batch now; else the latest deadline whose room it would take.

        `untrained` counts all groups not trained yet by deadline, those already in the batch included.
        """
        latest_blocker = None
        due = 0
        taken_due = 0
        for earlier in range(self._step, deadline):
            due += untrained.get(earlier, 0)
            taken_due += self._taken.get(earlier, 0)
            need = due - (earlier - self._step) * self._size
            taken_later = self.count - taken_due
            if taken_later + 1 > self._size - need:
                latest_blocker = earlier
        return latest_blocker

    def take(self, deadline: StepId) -> None:
        """Record that a group with this deadline joined the batch."""
        assert self._step <= deadline, f"a group due by step {deadline} in step {self._step} breaks the bound"
        self._taken[deadline] = self._taken.get(deadline, 0) + 1
        self.count += 1

    def check(self, untrained: Mapping[StepId, int]) -> None:
        """Assert that the batch can still be completed such that all groups left behind meet their deadlines."""
        assert self.count == sum(self._taken.values()) <= self._size, f"{self._taken} in a batch of {self._size}"
        due = taken_due = 0
        for deadline in range(self._step, max(untrained, default=self._step) + 1):
            due += untrained.get(deadline, 0)
            taken_due += self._taken.get(deadline, 0)
            need = due - (deadline - self._step) * self._size
            assert self.count - taken_due <= self._size - need, (
                f"step {self._step} left no room for those due {deadline}"
            )
