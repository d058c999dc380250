"""Deadlines of waits. A wait that ends early leaves its timer: when it is due, it is checked against the state."""

from __future__ import annotations

import heapq
from enum import Enum, auto
from typing import NamedTuple

from dora_rl.core.types import Nanoseconds


class Wait(Enum):
    """Kinds of waits."""

    LOAD = auto()
    MOVE = auto()
    SCORE = auto()
    TOOL = auto()
    PROGRESS = auto()
    TRAIN = auto()
    REBALANCE = auto()
    STALL = auto()
    ADMIT = auto()


class Timer(NamedTuple):
    """One deadline."""

    due: Nanoseconds
    number: int
    wait: Wait
    key: tuple[object, ...]
    """What is waited for; its form depends on the kind of wait."""


class Timers:
    """A heap of deadlines; ties break by order of setting, so that runs repeat."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._number = 0

    def set(self, due: Nanoseconds, wait: Wait, *key: object) -> None:
        self._number += 1
        heapq.heappush(self._heap, Timer(due, self._number, wait, key))

    def next_due(self) -> Nanoseconds | None:
        return self._heap[0].due if self._heap else None

    def pop_due(self, now: Nanoseconds) -> Timer | None:
        """The next timer that is due, if any."""
        if self._heap and self._heap[0].due <= now:
            return heapq.heappop(self._heap)
        return None

    def check(self, now: Nanoseconds) -> None:
        """Assert that no timer that was due before now is left."""
        due = self.next_due()
        assert due is None or due >= now, f"a timer of {due} is left at {now}"
