"""Which finished groups a step may take: earliest deadline first, and only as far as the older ones still fit.

Step n takes B groups. Call `left(d)` the untrained groups with deadline <= d that the step leaves behind; they must
fit into the steps n+1 .. d, that is, number at most (d - n) * B, for every d >= n. Then nothing ever misses its
deadline, whatever finishes when (the proof is in docs/architecture.md).

Groups are taken one at a time, as they finish. With `taken` groups in the batch so far, the batch can still meet the
rule for d if the room left in it is enough for what must be trained before d; that is the same as

    taken with deadline > d  <=  B - need(d),      need(d) = untrained with deadline <= d - (d - n) * B

so a young group is refused exactly when its place belongs to an older one that still runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.core.nouns import StepId, Version


class StepRule:
    """The rule for one step, fed with the counts of the ledger."""

    __slots__ = ("_size", "_staleness", "_step", "_taken", "count")

    def __init__(self, step: StepId, size: int, staleness: int) -> None:
        self._step = step
        self._size = size
        self._staleness = staleness
        self._taken: dict[Version, int] = {}
        self.count = 0

    def blocker(self, version: Version, untrained: Mapping[Version, int]) -> Version | None:
        """None if a group of `version` may join the batch now; else the version whose place it would take.

        `untrained` counts all groups not trained yet by version, those already in the batch included.
        """
        newest_blocker = None
        due = 0
        taken_due = 0
        for candidate in range(self._step - self._staleness, version):
            due += untrained.get(candidate, 0)
            taken_due += self._taken.get(candidate, 0)
            deadline = candidate + self._staleness
            need = due - (deadline - self._step) * self._size
            taken_later = self.count - taken_due
            if taken_later + 1 > self._size - need:
                newest_blocker = candidate
        return newest_blocker

    def take(self, version: Version) -> None:
        """Record that a group of `version` joined the batch."""
        assert self._step - self._staleness <= version <= self._step, (
            f"a group of version {version} in step {self._step} breaks the bound {self._staleness}"
        )
        self._taken[version] = self._taken.get(version, 0) + 1
        self.count += 1
