"""Exact time accounting.

Invariants:
- an account has exactly one current label from its birth to its close, so its totals add up to its lifetime;
- times are integer nanoseconds, so they add up exactly, not nearly;
- time never runs backwards in an account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dora_rl.core.activities import ASIDE, WORK, ActivityLabel, IdleCause
from dora_rl.core.types import Nanoseconds, SlotId, Version


class Activity(NamedTuple):
    """What somebody does now: a label, the version it is done for, and the cause where it idles."""

    label: ActivityLabel
    version: Version | None = None
    cause: IdleCause | None = None


class Segment(NamedTuple):
    """A stretch of time with one activity."""

    start: Nanoseconds
    end: Nanoseconds
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What each slot and the trainer did, for drawing."""

    slots: dict[SlotId, list[Segment]]
    trainer: list[Segment]
    moves: list[tuple[Nanoseconds, SlotId, SlotId, int]]
    """When, from, to, how many requests."""
    published: dict[Version, Nanoseconds]
    start: Nanoseconds
    end: Nanoseconds


class TimeAccount:
    """The time of one slot, or of the trainer."""

    __slots__ = ("_since", "born", "current", "segments", "totals")

    def __init__(self, now: Nanoseconds, activity: Activity, *, keep_segments: bool = False) -> None:
        self.born = now
        self.current = activity
        self.totals: defaultdict[Activity, Nanoseconds] = defaultdict(int)
        self.segments: list[Segment] | None = [] if keep_segments else None
        self._since = now

    def switch(self, now: Nanoseconds, activity: Activity) -> None:
        """From `now` on, time goes to `activity`."""
        if activity == self.current:
            return
        self.settle(now)
        self.current = activity

    def settle(self, now: Nanoseconds) -> None:
        """Book the time up to `now` on the current activity."""
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
        """From birth to the last settled moment."""
        return self._since - self.born

    def by_label(self) -> dict[ActivityLabel, Nanoseconds]:
        """Totals by label; they add up to `lifetime`."""
        result: dict[ActivityLabel, Nanoseconds] = {}
        for activity, spent in self.totals.items():
            result[activity.label] = result.get(activity.label, 0) + spent
        return result

    def idle_by_cause(self) -> dict[str, Nanoseconds]:
        """Idle time by the name of its cause (the version waited for is left out)."""
        result: dict[str, Nanoseconds] = {}
        for activity, spent in self.totals.items():
            if activity.label is ActivityLabel.IDLE:
                assert activity.cause is not None, "idle time without a cause"
                name = activity.cause.reason.value
                result[name] = result.get(name, 0) + spent
        return result


def named(label: str, cause: str) -> str:
    """The name under which time is added up: its label, or `idle: cause`."""
    return f"{ActivityLabel.IDLE}: {cause}" if label == ActivityLabel.IDLE else label


NOT_COUNTED = (ActivityLabel.TRAIN, *(named(ActivityLabel.IDLE, cause) for cause in ASIDE))
"""Time of slots that occupancy leaves out; devices that train do not generate."""


def occupancy(time: Mapping[str, float]) -> float:
    """Share that went into requests of the time in which slots could have worked; `time` is by name."""
    whole = sum(spent for name, spent in time.items() if name not in NOT_COUNTED)
    return sum(time.get(label, 0) for label in WORK) / whole if whole else 0.0
