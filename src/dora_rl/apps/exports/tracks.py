"""The tracks of a trace that have lanes: slots, their requests, and how their time was spent."""

from __future__ import annotations

import heapq
import re

from dora_rl.apps.exports.perfetto import PerfettoWriter, Slice, Track
from dora_rl.apps.run_reader import Window
from dora_rl.apps.segments import window_segments
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.time_accounting import Activity, Segment, activity_name
from dora_rl.core.types import Nanoseconds

_FIRST_RANK = 1000
"""Instances are below all other tracks of a run."""


class Lanes:
    """Sibling tracks of one name, for slices that overlap: Perfetto draws them as one track with lanes."""

    def __init__(self, writer: PerfettoWriter, name: str, parent: Track, rank: int) -> None:
        self._writer, self._name, self._parent, self._rank = writer, name, parent, rank
        self._free: list[Track] = []

    def take(self) -> Track:
        if self._free:
            return heapq.heappop(self._free)
        return self._writer.track(self._name, self._parent, rank=self._rank)

    def release(self, track: Track) -> None:
        heapq.heappush(self._free, track)


class InstanceTracks:
    """The tracks of an instance, across its restarts."""

    def __init__(self, writer: PerfettoWriter, run: Track, name: str) -> None:
        self._writer = writer
        number = re.sub(r"\D", "", name)
        self.track = writer.track(name, run, rank=_FIRST_RANK + int(number or 0))
        self.name = name
        self.kv = writer.track("KV tokens in use", self.track, rank=0, unit="tokens")
        self.kv_at: Nanoseconds | None = None
        """When KV tokens were last written."""
        self._slots: dict[int, SlotTracks] = {}

    def slot(self, number: int) -> SlotTracks:
        if number not in self._slots:
            self._slots[number] = SlotTracks(self._writer, self.track, f"{self.name}/{number}", 1 + number)
        return self._slots[number]

    def close(self) -> None:
        """Write the last slices."""
        for slot in self._slots.values():
            slot.activity.close()


class SlotTracks:
    """The tracks of a slot."""

    def __init__(self, writer: PerfettoWriter, instance: Track, name: str, rank: int) -> None:
        self.activity = ActivityLanes(writer, instance, name, rank)
        parent = self.activity.first
        self.weights = Lanes(writer, "weights", parent, 0)
        self.requests = Lanes(writer, "requests", parent, 1)


class ActivityLanes:
    """The time of a slot or the trainer. Equal segments that follow each other become one slice.

    Windows of two supervisor processes may overlap, since one that was killed may have written windows after the last
    event that is on disk, from whose time the next one goes on. Those have a lane of their own.
    """

    def __init__(self, writer: PerfettoWriter, parent: Track, name: str, rank: int) -> None:
        self._writer, self._parent, self._name, self._rank = writer, parent, name, rank
        self.first = writer.track(name, parent, rank=rank)
        self._tracks = [self.first]
        self._pending: list[Segment | None] = [None]

    def add(self, window: Window) -> None:
        lane = self._lane(window.start)
        before = self._pending[lane]
        for segment in window_segments(window, None if before is None else before.activity):
            last = self._pending[lane]
            if last is not None and last.activity == segment.activity and last.end == segment.start:
                self._pending[lane] = Segment(last.start, segment.end, segment.activity)
            else:
                self._write(lane)
                self._pending[lane] = segment

    def close(self) -> None:
        for lane in range(len(self._tracks)):
            self._write(lane)

    def _lane(self, start: Nanoseconds) -> int:
        for lane, last in enumerate(self._pending):
            if last is None or last.end <= start:
                return lane
        self._tracks.append(self._writer.track(self._name, self._parent, rank=self._rank))
        self._pending.append(None)
        return len(self._tracks) - 1

    def _write(self, lane: int) -> None:
        segment, self._pending[lane] = self._pending[lane], None
        if segment is not None:
            self._writer.span(self._tracks[lane], segment.start, segment.end, _activity_slice(segment.activity))


def _activity_slice(activity: Activity) -> Slice:
    label, version, cause = activity
    if cause is not None:
        return Slice(activity_name(label.value, cause.reason.value))
    if version is None:
        return Slice(label.value)
    name = f"train step {version}" if label is ActivityLabel.TRAIN else f"{label.value} v{version}"
    return Slice(name, version)
