"""Follows the groups of a simulated run from admission to training, and records what each step trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dora_rl.core.types import GroupId, Nanoseconds, StepId, Version


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What one step trained."""

    groups: int
    tokens: int
    """Response tokens."""
    longest: int
    """Tokens of the longest response."""
    staleness: Counter[int]
    """Number of groups by staleness."""
    latency: Nanoseconds
    """Time from admission to the last reward, summed over the groups."""
    finished_at: Nanoseconds = 0
    """When the version of the step was published."""


class StepRecords:
    """The steps of a run, and the untrained groups from which later steps will be made."""

    def __init__(self, group_size: int) -> None:
        self.steps: dict[StepId, StepRecord] = {}
        self.live_versions: dict[Version, int] = {}
        """How many versions had running requests when each version was published."""
        self._group_size = group_size
        self._versions: list[Version] = []
        """The version of each group, by its id."""
        self._lengths: dict[GroupId, tuple[int, int]] = {}
        """Sum and maximum of the response tokens of each untrained group."""
        self._spans: dict[GroupId, tuple[Nanoseconds, Nanoseconds]] = {}
        """When each untrained group was admitted, and when its last reward so far is known."""
        self._running: Counter[Version] = Counter()
        """Unfinished trajectories by version."""

    def admitted(self, group: GroupId, version: Version, now: Nanoseconds) -> None:
        assert group == len(self._versions)
        self._versions.append(version)
        self._lengths[group] = (0, 0)
        self._spans[group] = (now, now)
        self._running[version] += self._group_size

    def generated(self, group: GroupId, tokens: int) -> None:
        """One trajectory of the group has ended with this many response tokens."""
        self._running[self._versions[group]] -= 1
        total, longest = self._lengths[group]
        self._lengths[group] = (total + tokens, max(longest, tokens))

    def scored(self, group: GroupId, at: Nanoseconds) -> None:
        """A reward of the group is known at this time."""
        self._spans[group] = (self._spans[group][0], at)

    def ended_without_signal(self, group: GroupId) -> None:
        """No step will train the group."""
        del self._lengths[group], self._spans[group]

    def response_tokens(self, group: GroupId) -> int:
        """Response tokens of an untrained group so far."""
        return self._lengths[group][0]

    def applied(self, step: StepId, groups: tuple[GroupId, ...]) -> None:
        """The step trains these groups."""
        lengths = [self._lengths.pop(group) for group in groups]
        spans = [self._spans.pop(group) for group in groups]
        self.steps[step] = StepRecord(
            groups=len(groups),
            tokens=sum(total for total, _ in lengths),
            longest=max(longest for _, longest in lengths),
            staleness=Counter(step - self._versions[group] for group in groups),
            latency=sum(end - start for start, end in spans),
        )

    def published(self, version: Version, now: Nanoseconds) -> None:
        self.live_versions[version] = sum(1 for count in self._running.values() if count)
        if version - 1 in self.steps:
            self.steps[version - 1].finished_at = now
