"""One run, running or finished, read incrementally: only what was added since the last time is read again.

Invariants:
- all data is used under `lock`, since requests are answered by several threads;
- the ledger is queried at most once in `_PAUSE_FACTOR` times the duration of the last query, so that reading takes a
  small share of one processor however long the run is;
- `position` costs a few calls of `stat`: it tells whether anything was added without reading it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from dora_rl.apps import run_reader
from dora_rl.apps.exports.prometheus import RunMetrics
from dora_rl.apps.run_reader import MetricsFold, RunFacts, Window
from dora_rl.apps.serve.lanes import Lanes
from dora_rl.apps.serve.tail import JsonlTail
from dora_rl.apps.summary import RunProgress, Summary, progress, summary_of
from dora_rl.core.types import Nanoseconds, TrajectoryId
from dora_rl.runtime.run_dir import RunDir

_PAUSE_FACTOR = 20
_LEAST_PAUSE = 0.5


class LiveRun:
    """A run as the page shows it."""

    def __init__(self, folder: RunDir) -> None:
        self.folder = folder
        self.name = folder.path.name
        self.lock = threading.RLock()
        self.prometheus = RunMetrics(folder)
        self._forget()
        self._facts: RunFacts | None = None
        self._facts_position: Any = None
        self._facts_due = 0.0
        self._progress: tuple[dict[str, str], RunProgress] | None = None

    def _forget(self) -> None:
        self._tails = {name: JsonlTail(getattr(self.folder, name)) for name in ("metrics", "activity", "samples")}
        self._fold = MetricsFold()
        self.metrics = self._fold.metrics()
        self.lanes = Lanes()
        self.notes: list[dict[str, Any]] = []
        self.samples: dict[TrajectoryId, int] = {}
        """Where the text of a trajectory starts in `samples.jsonl`; of several the last."""

    def position(self) -> dict[str, str]:
        """How far each file has grown, and whether the run is running: it differs if anything was added."""
        files = {
            "metrics": [self.folder.metrics],
            "activity": [self.folder.activity],
            "samples": [self.folder.samples],
            "ledger": [self.folder.ledger, self.folder.ledger.with_name(f"{self.folder.ledger.name}-wal")],
        }
        found = {name: "+".join(_stamp(path) for path in paths) for name, paths in files.items()}
        return found | {"running": str(int(run_reader.is_running(self.folder)))}

    def refresh(self) -> None:
        """Read what was added to the files; hold `lock`."""
        before = sum(tail.resets for tail in self._tails.values())
        self._read()
        if sum(tail.resets for tail in self._tails.values()) > before:
            self._forget()  # a file was replaced
            self._read()

    def _read(self) -> None:
        fresh = False
        for _, record in self._tails["metrics"].read():
            self._fold.add(record)
            fresh = True
        if fresh:
            self.metrics = self._fold.metrics()
        for _, record in self._tails["activity"].read():
            if "note" in record:
                self.notes.append(record)
            else:
                self.lanes.add(Window(record["who"], record["start"], record["end"], record["shares"]))
        for offset, record in self._tails["samples"].read():
            self.samples[record["trajectory"]] = offset

    def facts(self) -> RunFacts:
        """Facts from the ledger, at most a little old; hold `lock`."""
        position = self.position()["ledger"]
        now = time.monotonic()
        ended = not run_reader.is_running(self.folder)
        if self._facts is None or (position != self._facts_position and (ended or now >= self._facts_due)):
            self._facts = run_reader.read_facts(self.folder)
            self._facts_position = position
            spent = time.monotonic() - now
            self._facts_due = now + max(_LEAST_PAUSE, _PAUSE_FACTOR * spent)
        return self._facts

    def summary(self) -> Summary:
        """The values that the summary and the report of the run have, too; hold `lock`."""
        time_spent = (self.lanes.slot_time, self.lanes.trainer_time)
        return summary_of(self.folder, self.metrics, self.facts(), time_spent, self.notes)

    def progress(self) -> RunProgress:
        """The progress of the run for a list of runs; it is read again only if a file has changed."""
        position = self.position()
        if self._progress is None or self._progress[0] != position:
            self._progress = (position, progress(self.folder))
        return self._progress[1]

    def span(self) -> tuple[Nanoseconds, Nanoseconds]:
        """The time that the timeline covers."""
        published = [note["at"] for note in self.notes if note["note"] == "published"]
        starts = [*([] if self.lanes.start is None else [self.lanes.start]), *published[:1]]
        return min(starts, default=0), max(self.lanes.end, *published[-1:], 1)

    def quiet_seconds(self) -> float:
        """Wall-clock time since the activity of the run was last written."""
        try:
            return max(0.0, time.time() - self.folder.activity.stat().st_mtime)
        except OSError:
            return 0.0


def _stamp(path: Path) -> str:
    try:
        status = path.lstat()
    except OSError:
        return "0"
    return f"{status.st_size:x}.{status.st_mtime_ns & 0xFFFFFFFFFF:x}"
