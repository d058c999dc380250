"""Exact time accounting.

Invariants:
- an account has exactly one current activity at any time, so its totals add up to its lifetime;
- times are integer nanoseconds, so sums are exact;
- time never runs backwards in an account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dora_rl.core.activities import UNAVAILABLE, WORK, ActivityLabel, IdleCause
from dora_rl.core.types import Nanoseconds, SlotId, Version


class Activity(NamedTuple):
    """What a slot or the trainer does: a label, the version that it works for, and the cause if it is idle."""

    label: ActivityLabel
    version: Version | None = None
    cause: IdleCause | None = None


class Segment(NamedTuple):
    """An interval of time with one activity."""

    start: Nanoseconds
    end: Nanoseconds
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The activities of each slot and of the trainer, for drawing."""

    slots: dict[SlotId, list[Segment]]
    trainer: list[Segment]
    moves: list[tuple[Nanoseconds, SlotId, SlotId, int]]
    """Time, source, target and number of requests of each move."""
    published: dict[Version, Nanoseconds]
    bounds: list[tuple[Nanoseconds, int]]
    """When the staleness bound changed, and to what."""
    start: Nanoseconds
    end: Nanoseconds


class TimeAccount:
    """Accounts for the time of one slot, or of the trainer."""

    __slots__ = ("_since", "created", "current", "segments", "totals")

    def __init__(self, now: Nanoseconds, activity: Activity, *, keep_segments: bool = False) -> None:
        self.created = now
        self.current = activity
        self.totals: defaultdict[Activity, Nanoseconds] = defaultdict(int)
        self.segments: list[Segment] | None = [] if keep_segments else None
        self._since = now

    def switch(self, now: Nanoseconds, activity: Activity) -> None:
        """Account for time from `now` on under `activity`."""
        if activity == self.current:
            return
        self.settle(now)
        self.current = activity

    def settle(self, now: Nanoseconds) -> None:
        """Add the time up to `now` to the current activity."""
        spent = now - self._since
        assert spent >= 0, f"time ran backwards by {-spent} ns"
        if not spent:
            return
        self.totals[self.current] += spent
        if self.segments is not None:
            last = self.segments[-1] if self.segments else None
            if last is not None and last.activity == self.current and last.end == self._since:
                self.segments[-1] = Segment(last.start, now, self.current)
            else:
                self.segments.append(Segment(self._since, now, self.current))
        self._since = now

    @property
    def lifetime(self) -> Nanoseconds:
        """Time from the creation of the account to the last settled moment."""
        return self._since - self.created

    def by_label(self) -> dict[ActivityLabel, Nanoseconds]:
        """Totals by label; they add up to `lifetime`."""
        result: dict[ActivityLabel, Nanoseconds] = {}
        for activity, spent in self.totals.items():
            result[activity.label] = result.get(activity.label, 0) + spent
        return result

    def idle_by_cause(self) -> dict[str, Nanoseconds]:
        """Idle time by the name of its cause, over all versions waited for."""
        result: dict[str, Nanoseconds] = {}
        for activity, spent in self.totals.items():
            if activity.label is ActivityLabel.IDLE:
                assert activity.cause is not None, "idle time without a cause"
                name = activity.cause.reason.value
                result[name] = result.get(name, 0) + spent
        return result


def activity_name(label: str, cause: str) -> str:
    """The name under which time is summed: its label, or `idle: cause`."""
    return f"{ActivityLabel.IDLE}: {cause}" if label == ActivityLabel.IDLE else label


NOT_COUNTED = (ActivityLabel.TRAIN, *(activity_name(ActivityLabel.IDLE, cause) for cause in UNAVAILABLE))
"""Slot time that occupancy leaves out. Devices that train can't generate."""


def occupancy(time: Mapping[str, float]) -> float:
    """The share of the time available to slots that they spent on requests; `time` is by `activity_name`."""
    available = sum(spent for name, spent in time.items() if name not in NOT_COUNTED)
    return sum(time.get(label, 0) for label in WORK) / available if available else 0.0
