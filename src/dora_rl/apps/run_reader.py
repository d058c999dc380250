"""Reads the metrics, activity, samples and ledger of a run directory.

Invariants:
- reading changes nothing and needs no torch, so that a run can be inspected while it is running;
- a line that a crash cut short is skipped; a step that was trained again counts once, with its last values;
- counts of groups, trajectories, tokens and moves come from the ledger, which is complete after any crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from dora_rl.core.errors import UserError
from dora_rl.core.types import Nanoseconds, StepId, Version
from dora_rl.ledger.ledger import DAMAGE
from dora_rl.ledger.reader import connect_read_only
from dora_rl.runtime.checkpoint_manifest import best_version
from dora_rl.runtime.run_dir import RunDir

State = Literal["finished", "stopped", "running"]


class Window(NamedTuple):
    """The time of a slot or the trainer by activity; the order of activities within the window is not recorded."""

    who: str
    start: Nanoseconds
    end: Nanoseconds
    shares: list[tuple[str, Version | None, str, Nanoseconds]]
    """Activity label, version, idle cause, time."""


class ActivityLog(NamedTuple):
    """`activity.jsonl`."""

    windows: list[Window]
    notes: list[dict[str, Any]]
    """Moves, published versions and lost processes."""


class Metrics(NamedTuple):
    """`metrics.jsonl`: metrics by step and by evaluated version."""

    steps: dict[StepId, dict[str, Any]]
    evaluations: dict[Version, dict[str, Any]]
    ledger_seconds: float
    """Time spent on writing the ledger, over all supervisor processes of the run."""


class RunFacts(NamedTuple):
    """Facts from the ledger."""

    published: dict[StepId, Nanoseconds]
    """When the version of each step was published."""
    staleness: Counter[int]
    """Trained groups by staleness."""
    lengths: dict[StepId, list[int]]
    """Tokens of the trained responses."""
    moved: int
    """Requests that arrived after a move."""
    failed: Counter[str]
    """Failed trajectories by reason."""
    without_signal: Counter[float]
    """Groups that ended without signal, by the reward of their trajectories."""
    groups: int
    """Groups that were admitted."""
    open_groups: int
    drained: bool
    """Whether the data has ended and all its prompts were admitted."""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file that may be missing or cut short."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = parse_line(line)
            if record is not None:
                yield record


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if a crash cut it short."""
    record = parse(line)
    return record if isinstance(record, dict) else None


def parse(line: bytes) -> Any:
    """The value of a line; None if it was cut short."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line)
    with contextlib.suppress(ValueError):
        return json.loads(line)  # accepts NaN and infinity, too
    return None


def read_metrics(folder: RunDir) -> Metrics:
    """The metrics of all steps and evaluations."""
    fold = MetricsFold()
    for record in lines(folder.metrics):
        fold.add(record)
    return fold.metrics()


class MetricsFold:
    """Collects the records of `metrics.jsonl` one by one, in the order in which they were written."""

    def __init__(self) -> None:
        self._steps: dict[StepId, dict[str, Any]] = {}
        self._evaluations: dict[Version, dict[str, Any]] = {}
        self._before = self._ledger = 0.0

    def add(self, record: dict[str, Any]) -> None:
        """Take in the next record."""
        if "evaluation" in record:
            self._evaluations[record["evaluation"]] = record
        elif "step" in record:
            self._steps[record["step"]] = record
            now = record.get("timing_s/ledger", self._before)
            # The count starts at 0 in each supervisor process.
            self._ledger += now - self._before if now >= self._before else now
            self._before = now

    def metrics(self) -> Metrics:
        """The metrics so far."""
        return Metrics(dict(sorted(self._steps.items())), dict(sorted(self._evaluations.items())), self._ledger)


def read_activity(folder: RunDir) -> ActivityLog:
    """All windows and notes, in the order in which they were written."""
    windows, notes = [], []
    for record in lines(folder.activity):
        if "note" in record:
            notes.append(record)
        else:
            windows.append(Window(record["who"], record["start"], record["end"], record["shares"]))
    return ActivityLog(windows, notes)


def read_facts(folder: RunDir) -> RunFacts:
    """Facts from the ledger; empty for a run that has not started."""
    if not folder.ledger.exists():
        return RunFacts({}, Counter(), {}, 0, Counter(), Counter(), 0, 0, drained=False)
    with open_ledger(folder) as connection:
        return _facts(connection)


@contextlib.contextmanager
def open_ledger(folder: RunDir) -> Iterator[sqlite3.Connection]:
    """The ledger of a run, for reading only; a `UserError` if it is damaged or of another version of dora-rl."""
    if not folder.ledger.exists():
        raise UserError(f"the run {folder.path} has no ledger yet: it has not started")
    try:
        with contextlib.closing(connect_read_only(folder.ledger)) as connection:
            yield connection
    except (*DAMAGE, msgspec.DecodeError) as error:
        raise UserError(f"the ledger {folder.ledger} can't be read: {error}") from error


def _facts(connection: sqlite3.Connection) -> RunFacts:
    published = connection.execute("SELECT step, published_at FROM steps WHERE published_at IS NOT NULL ORDER BY step")
    staleness = connection.execute(
        "SELECT step - version, count(*) FROM groups WHERE step IS NOT NULL GROUP BY 1 ORDER BY 1"
    )
    lengths: dict[StepId, list[int]] = {}
    trained = """
        SELECT groups.step, trajectories.tokens FROM groups JOIN trajectories ON trajectories."group" = groups.id
        WHERE groups.step IS NOT NULL AND trajectories.failed IS NULL AND trajectories.tokens IS NOT NULL
        ORDER BY groups.step
    """
    for step, tokens in connection.execute(trained):
        lengths.setdefault(step, []).append(tokens)
    (moved,) = connection.execute("SELECT count(*) FROM moves WHERE arrived = 1").fetchone()
    failed = connection.execute("SELECT failed, count(*) FROM trajectories WHERE failed IS NOT NULL GROUP BY 1")
    without_signal = connection.execute("SELECT no_signal, count(*) FROM groups WHERE no_signal IS NOT NULL GROUP BY 1")
    (groups,) = connection.execute("SELECT count(*) FROM groups").fetchone()
    (unfinished,) = connection.execute(
        "SELECT count(*) FROM groups WHERE step IS NULL AND failure IS NULL AND no_signal IS NULL"
    ).fetchone()
    return RunFacts(
        dict(published),
        Counter(dict(staleness)),
        lengths,
        moved,
        Counter(dict(failed)),
        Counter(dict(without_signal)),
        groups,
        unfinished,
        drained=_drained(connection),
    )


def _drained(connection: sqlite3.Connection) -> bool:
    last = connection.execute(
        'SELECT 1 FROM events WHERE CAST(event AS TEXT) LIKE \'%"PromptsArrived"%"last":true%\' LIMIT 1'
    )
    if last.fetchone() is None:
        return False
    (waiting,) = connection.execute("SELECT (SELECT count(*) FROM prompts) - (SELECT count(*) FROM groups)").fetchone()
    return bool(waiting == 0)


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run; the `config.json` of a model has other keys."""
    try:
        document = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"base", "config"} <= document.keys()


def is_running(folder: RunDir) -> bool:
    """Whether a supervisor holds the run's lock."""
    try:
        with (folder.path / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def policies(folder: RunDir) -> dict[Version, Path]:
    """Policy folders by version: of the checkpoints, for a version saved twice the later one, and of the best."""
    found = sorted(folder.checkpoints.glob("version-*.*/policy"), key=_order)
    best, version = best_policy(folder), best_version(folder.checkpoints)
    kept = {} if best is None or version is None else {version: best}
    return kept | {_order(path)[0]: path for path in found}


def best_policy(folder: RunDir) -> Path | None:
    """The policy of the version with the highest held-out accuracy, if it is kept."""
    path = folder.checkpoints / "best" / "policy"
    return path if path.is_dir() else None


def _order(policy: Path) -> tuple[int, int]:
    version, _, number = policy.parent.name.removeprefix("version-").partition(".")
    return int(version), int(number)
