"""The activities of all slots and of the trainer over a whole run, in bounded memory, sampled to the width of a screen.

Invariants:
- a lane's segments are in order and do not overlap;
- a lane has at most `_PER_LANE` segments (fewer if there are many lanes): if it would have more, its older half is
  sampled more coarsely, so that a run of any length fits; `totals` stay exact;
- the size of an answer depends on the columns and rows that were asked for, not on the length of the run.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dora_rl.apps.run_reader import Window
from dora_rl.apps.segments import likely_order, natural
from dora_rl.apps.summary import totals, worker_id
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.time_accounting import Activity, activity_name
from dora_rl.core.types import SECOND, Nanoseconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAINER = "trainer"
MOST_ROWS = 64
"""Lanes that are drawn one by one; above that, the shares of all lanes are drawn together as well."""
_PER_LANE = 40_000
_ALL_LANES = 4_000_000
"""Segments over all lanes: about 80 MB."""
_FLEET_COLUMNS = 400
_MOST_CELLS = 40_000
"""Columns times rows of an answer: at most a few hundred kilobytes."""
_ORDER = tuple(ActivityLabel)


class Cells(NamedTuple):
    """The time of a lane by column and activity: one entry for each pair that occurs, ordered by column."""

    columns: NDArray[np.int64]
    codes: NDArray[np.int64]
    spent: NDArray[np.float64]


class Lane:
    """The segments of one slot or of the trainer."""

    def __init__(self) -> None:
        self.starts, self.ends, self.codes = array("q"), array("q"), array("i")
        self.last: Activity | None = None

    def append(self, start: Nanoseconds, end: Nanoseconds, code: int) -> None:
        """Add a segment after all others; what overlaps the last one is left out."""
        if self.ends:
            start = max(start, self.ends[-1])
            if end <= start:
                return
            if self.codes[-1] == code and self.ends[-1] == start:
                self.ends[-1] = end
                return
        self.starts.append(start)
        self.ends.append(end)
        self.codes.append(code)

    def cells(self, edges: NDArray[np.int64]) -> Cells:
        """How the time between consecutive edges was spent."""
        starts, ends, codes = self._arrays()
        first = int(np.searchsorted(ends, edges[0], "right"))
        last = int(np.searchsorted(starts, edges[-1], "left"))
        starts, ends, codes = starts[first:last], ends[first:last], codes[first:last]
        if not len(starts):
            none = np.zeros(0, np.int64)
            return Cells(none, none, np.zeros(0))
        cuts = np.unique(np.concatenate([edges, starts, ends]))
        cuts = cuts[(cuts >= edges[0]) & (cuts <= edges[-1])]
        begins, lengths = cuts[:-1], np.diff(cuts)
        segment = np.searchsorted(starts, begins, "right") - 1
        covered = (segment >= 0) & (begins < ends[np.maximum(segment, 0)])
        column = np.searchsorted(edges, begins[covered], "right") - 1
        width = int(codes.max()) + 1
        pairs, where = np.unique(column * width + codes[segment[covered]], return_inverse=True)
        spent = np.bincount(where, weights=lengths[covered], minlength=len(pairs))
        return Cells(pairs // width, pairs % width, spent.astype(np.float64))

    def compact(self, limit: int) -> None:
        """If there are more segments than the limit, sample the older half of them to half as many."""
        if len(self.starts) <= limit:
            return
        half = len(self.starts) // 2
        old, (starts, ends, codes) = Lane(), self._arrays()
        edges = np.unique(np.linspace(int(starts[0]), int(ends[half - 1]), half // 2 + 1).astype(np.int64))
        for column, code in zip(*longest(self.cells(edges)), strict=True):
            old.append(int(edges[column]), int(edges[column + 1]), int(code))
        for start, end, code in zip(starts[half:].tolist(), ends[half:].tolist(), codes[half:].tolist(), strict=True):
            old.append(start, end, code)
        self.starts, self.ends, self.codes = old.starts, old.ends, old.codes

    def _arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        return (
            np.array(self.starts, dtype=np.int64),
            np.array(self.ends, dtype=np.int64),
            np.array(self.codes, dtype=np.int64),
        )


def longest(cells: Cells) -> tuple[list[int], list[int]]:
    """Columns that have an activity, and the longest activity in each."""
    order = np.lexsort((-cells.spent, cells.columns))
    columns, first = np.unique(cells.columns[order], return_index=True)
    return columns.tolist(), cells.codes[order][first].tolist()


class Lanes:
    """All lanes of a run. Restarts of an instance share a lane."""

    def __init__(self) -> None:
        self._codes: dict[Activity, int] = {}
        self.activities: list[Activity] = []
        self.trainer = Lane()
        self.slots: dict[str, Lane] = {}
        self.slot_time: Counter[str] = Counter()
        """Exact time of all slots by activity name."""
        self.trainer_time: Counter[str] = Counter()
        self.by_instance: dict[str, Counter[str]] = {}
        """The same for each instance, by its name with the restart number."""
        self.start: Nanoseconds | None = None
        self.end: Nanoseconds = 0

    def add(self, window: Window) -> None:
        """Add a window of a slot or of the trainer."""
        slots, trainer = totals([window])
        self.slot_time.update(slots)
        self.trainer_time.update(trainer)
        lane = self.trainer
        if window.who != TRAINER:
            self.by_instance.setdefault(window.who.partition("/")[0], Counter()).update(slots)
            lane = self.slots.setdefault(worker_id(window.who), Lane())
            self.start = window.start if self.start is None else min(self.start, window.start)
        self.end = max(self.end, window.end)
        at = window.start
        for activity, spent in likely_order(window, lane.last):
            lane.append(at, at + spent, self._code(activity))
            at += spent
            lane.last = activity
        lane.compact(max(1000, min(_PER_LANE, _ALL_LANES // (len(self.slots) + 1))))

    def slots_between(self, times: Sequence[Nanoseconds]) -> list[Counter[str]]:
        """The time of all slots between consecutive times, by activity name."""
        return self._between(self.slots.values(), times)

    def trainer_between(self, times: Sequence[Nanoseconds]) -> list[Counter[str]]:
        """The trainer's time between consecutive times, by activity name."""
        return self._between([self.trainer], times)

    def _between(self, lanes: Iterable[Lane], times: Sequence[Nanoseconds]) -> list[Counter[str]]:
        sums: list[Counter[str]] = [Counter() for _ in times[1:]]
        edges = np.array(times, dtype=np.int64)
        names = [self._name(activity) for activity in self.activities]
        for lane in lanes:
            found = lane.cells(edges)
            for column, code, spent in zip(*(part.tolist() for part in found), strict=True):
                sums[column][names[code]] += round(spent)
        return sums

    def view(self, start: Nanoseconds, end: Nanoseconds, columns: int, first: int) -> dict[str, Any]:
        """The trainer and up to 64 lanes from the first one on, and above 64 lanes the shares of all of them."""
        names = sorted(self.slots, key=natural)
        shown = names[first : first + MOST_ROWS]
        columns = min(columns, max(_FLEET_COLUMNS, _MOST_CELLS // (len(shown) + 1)))
        edges = np.unique(np.linspace(start, max(end, start + columns), columns + 1).astype(np.int64))
        rows = [{"name": name, "runs": self._runs(self.slots[name], edges)} for name in shown]
        fleet = self._fleet(start, end, min(columns, _FLEET_COLUMNS)) if len(names) > MOST_ROWS else None
        return {
            "columns": len(edges) - 1,
            "lanes": len(names),
            "first": first,
            "trainer": self._runs(self.trainer, edges),
            "rows": rows,
            "fleet": fleet,
        }

    def _runs(self, lane: Lane, edges: NDArray[np.int64]) -> list[list[Any]]:
        """Runs of [columns, label, version, cause]; no label where nothing is recorded."""
        runs: list[list[Any]] = []
        before = -1
        for column, code in zip(*longest(lane.cells(edges)), strict=True):
            if column > before + 1:
                runs.append([column - before - 1, "", None, ""])
            cell = self._cell(code)
            if runs and runs[-1][1:] == cell:
                runs[-1][0] += 1
            else:
                runs.append([1, *cell])
            before = column
        return runs

    def _fleet(self, start: Nanoseconds, end: Nanoseconds, columns: int) -> dict[str, Any]:
        """For each column, the shares of all slots by activity: work by version first, then idle time by cause."""
        edges = np.unique(np.linspace(start, max(end, start + columns), columns + 1).astype(np.int64))
        sums: list[Counter[int]] = [Counter() for _ in edges[1:]]
        for lane in self.slots.values():
            found = lane.cells(edges)
            for column, code, spent in zip(*(part.tolist() for part in found), strict=True):
                sums[column][code] += spent
        whole = [float(after - before) * len(self.slots) for before, after in itertools.pairwise(edges)]
        return {"columns": [self._shares(each, all_) for each, all_ in zip(sums, whole, strict=True)]}

    def _shares(self, sums: Counter[int], whole: float) -> list[list[Any]]:
        ranked = sorted(sums, key=lambda code: self._rank(self.activities[code]))
        return [[round(sums[code] / whole, 4), *self._cell(code)] for code in ranked if sums[code] >= whole / 1000]

    @staticmethod
    def _rank(activity: Activity) -> tuple[int, int, str]:
        return _ORDER.index(activity.label), -1 if activity.version is None else activity.version, str(activity.cause)

    def _code(self, activity: Activity) -> int:
        code = self._codes.get(activity)
        if code is None:
            code = self._codes[activity] = len(self.activities)
            self.activities.append(activity)
        return code

    def _cell(self, code: int) -> list[Any]:
        activity = self.activities[code]
        return [activity.label.value, activity.version, "" if activity.cause is None else str(activity.cause)]

    @staticmethod
    def _name(activity: Activity) -> str:
        return activity_name(activity.label, "" if activity.cause is None else activity.cause.reason.value)


def marks(notes: Sequence[dict[str, Any]], start: Nanoseconds, end: Nanoseconds, most: int) -> dict[str, Any]:
    """Moves, published versions, changes of the bound and lost processes in an interval, thinned out to `most` each."""

    def some(kind: str, *fields: str) -> list[list[Any]]:
        found = [note for note in notes if note["note"] == kind and start <= note["at"] <= end]
        every = max(1, -(-len(found) // most))
        return [[round(note["at"] / SECOND, 3), *(note[name] for name in fields)] for note in found[::every]]

    moves = [
        [at, worker_id(source), worker_id(target), count]
        for at, source, target, count in some("moved", "source", "target", "count")
    ]
    return {
        "moves": moves,
        "published": some("published", "version"),
        "bounds": some("bound", "after"),
        "lost": [[at, worker_id(who), reason] for at, who, reason in some("lost", "who", "reason")],
    }
