"""Activity windows as segments of time: the one place that decides in which order the time of a window is drawn.

A window records how its time was divided, not in which order, so the order is a likely one. The sums by activity and
cause are exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from dora_rl.apps.run_reader import Window
from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, Segment
from dora_rl.core.types import Nanoseconds, SlotId

_ORDER = (
    ActivityLabel.LOAD,
    ActivityLabel.PUBLISH,
    ActivityLabel.REPREFILL,
    ActivityLabel.PREFILL,
    ActivityLabel.DECODE,
    ActivityLabel.TRAIN,
    ActivityLabel.MIGRATE,
)


def segments(windows: Iterable[Window]) -> Iterator[Segment]:
    """The segments of one slot, or of the trainer, from its windows in the order of time."""
    last: Activity | None = None
    for window in windows:
        for segment in window_segments(window, last):
            yield segment
            last = segment.activity


def window_segments(window: Window, last: Activity | None) -> Iterator[Segment]:
    """The segments of one window, after an activity."""
    start: Nanoseconds = window.start
    for activity, spent in likely_order(window, last):
        yield Segment(start, start + spent, activity)
        start += spent


def likely_order(window: Window, last: Activity | None) -> list[tuple[Activity, Nanoseconds]]:
    """The shares in a likely order: the last activity, work of old versions, idle time, a load, work of the new one."""
    shares = [(_activity(label, version, cause), spent) for label, version, cause, spent in window.shares]
    fresh = {
        activity.version for activity, _ in shares if activity.label in (ActivityLabel.LOAD, ActivityLabel.PUBLISH)
    }

    def order(share: tuple[Activity, Nanoseconds]) -> tuple[bool, int, int, int]:
        activity = share[0]
        if activity.label is ActivityLabel.IDLE:
            return activity != last, 1, 0, 0
        version = -1 if activity.version is None else activity.version
        late = 2 if activity.version in fresh else 0
        return activity != last, late, version, _ORDER.index(activity.label)

    return sorted(shares, key=order)


@functools.lru_cache(maxsize=4096)
def _activity(label: str, version: int | None, cause: str) -> Activity:
    return Activity(ActivityLabel(label), version, IdleCause(reason=IdleReason(cause)) if cause else None)


def slot_id(name: str) -> SlotId:
    """The slot of a name such as `i0/1`."""
    instance, _, number = name.partition("/")
    return SlotId(instance, int(number or 0))


def natural(name: str) -> tuple[int, str, int]:
    """Sort key by which i2 comes before i10."""
    slot = slot_id(name)
    return len(slot.instance), slot.instance, slot.number
