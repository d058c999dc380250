"""What a run has written down, read back: metrics, activity, samples and ledger of a run folder.

Invariants:
- reading changes nothing and needs no torch, so that a run can be looked at while it goes on;
- a line that a crash cut short is passed over; a step that was trained again counts once, as it was trained last;
- counts of groups, trajectories, tokens and moves come from the ledger, which no crash makes incomplete.
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
from dora_rl.ledger.ledger import DAMAGE, check_schema
from dora_rl.runtime.run_dir import RunDir

State = Literal["finished", "stopped", "going on"]


class Window(NamedTuple):
    """Where the time of a slot or the trainer went; how it was ordered inside is not known."""

    who: str
    start: Nanoseconds
    end: Nanoseconds
    shares: list[tuple[str, Version | None, str, Nanoseconds]]
    """Label, version, cause, time."""


class ActivityLog(NamedTuple):
    """`activity.jsonl`."""

    windows: list[Window]
    notes: list[dict[str, Any]]
    """Moves, published versions and lost processes."""


class Metrics(NamedTuple):
    """`metrics.jsonl`: figures by step, and by evaluated version."""

    steps: dict[StepId, dict[str, Any]]
    evaluations: dict[Version, dict[str, Any]]
    ledger_seconds: float
    """Spent on writing the ledger, over all processes that carried the run."""


class RunFacts(NamedTuple):
    """What the ledger says."""

    published: dict[StepId, Nanoseconds]
    """When the version that a step gave was published."""
    staleness: Counter[int]
    """Trained groups by staleness."""
    lengths: dict[StepId, list[int]]
    """Tokens of the trained responses."""
    moved: int
    """Requests that arrived."""
    failed: Counter[str]
    """Trajectories with a verdict, by reason."""
    open_groups: int
    drained: bool
    """The data has ended and every prompt of it was admitted."""


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSONL file that may be missing or cut short."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            record = _parse(line)
            if isinstance(record, dict):
                yield record


def _parse(line: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line)
    with contextlib.suppress(ValueError):
        return json.loads(line)  # takes numbers that are not finite, too
    return None


def read_metrics(folder: RunDir) -> Metrics:
    """The figures of all steps and evaluations."""
    steps: dict[StepId, dict[str, Any]] = {}
    evaluations: dict[Version, dict[str, Any]] = {}
    before = ledger = 0.0
    for record in lines(folder.metrics):
        if "evaluation" in record:
            evaluations[record["evaluation"]] = record
        elif "step" in record:
            steps[record["step"]] = record
            now = record.get("timing_s/ledger", before)
            # The count begins anew in each process that carries the run.
            ledger += now - before if now >= before else now
            before = now
    return Metrics(dict(sorted(steps.items())), dict(sorted(evaluations.items())), ledger)


def read_activity(folder: RunDir) -> ActivityLog:
    """Where the time went and what happened meanwhile, in the order of writing."""
    windows, notes = [], []
    for record in lines(folder.activity):
        if "note" in record:
            notes.append(record)
        else:
            windows.append(Window(record["who"], record["start"], record["end"], record["shares"]))
    return ActivityLog(windows, notes)


def read_facts(folder: RunDir) -> RunFacts:
    """What the ledger says; of a run that has not begun, nothing."""
    if not folder.ledger.exists():
        return RunFacts({}, Counter(), {}, 0, Counter(), 0, drained=False)
    try:
        # Without a log beside it nobody writes it, and it can be read without making one.
        resting = "" if folder.ledger.with_name("ledger.db-wal").exists() else "&immutable=1"
        connection = sqlite3.connect(f"{folder.ledger.resolve().as_uri()}?mode=ro{resting}", uri=True, timeout=30)
        try:
            check_schema(connection, folder.ledger)
            return _facts(connection)
        finally:
            connection.close()
    except DAMAGE as error:
        raise UserError(f"the ledger {folder.ledger} can't be read: {error}") from error


def _facts(ask: sqlite3.Connection) -> RunFacts:
    published = ask.execute("SELECT step, published_at FROM steps WHERE published_at IS NOT NULL ORDER BY step")
    staleness = ask.execute("SELECT step - version, count(*) FROM groups WHERE step IS NOT NULL GROUP BY 1 ORDER BY 1")
    lengths: dict[StepId, list[int]] = {}
    trained = """
        SELECT groups.step, trajectories.tokens FROM groups JOIN trajectories ON trajectories."group" = groups.id
        WHERE groups.step IS NOT NULL AND trajectories.failed IS NULL AND trajectories.tokens IS NOT NULL
        ORDER BY groups.step
    """
    for step, tokens in ask.execute(trained):
        lengths.setdefault(step, []).append(tokens)
    (moved,) = ask.execute("SELECT count(*) FROM moves WHERE arrived = 1").fetchone()
    failed = ask.execute("SELECT failed, count(*) FROM trajectories WHERE failed IS NOT NULL GROUP BY 1")
    (unfinished,) = ask.execute("SELECT count(*) FROM groups WHERE step IS NULL AND failure IS NULL").fetchone()
    return RunFacts(
        dict(published),
        Counter(dict(staleness)),
        lengths,
        moved,
        Counter(dict(failed)),
        unfinished,
        drained=_drained(ask),
    )


def _drained(ask: sqlite3.Connection) -> bool:
    last = ask.execute('SELECT 1 FROM events WHERE CAST(event AS TEXT) LIKE \'%"PromptsArrived"%"last":true%\' LIMIT 1')
    if last.fetchone() is None:
        return False
    (waiting,) = ask.execute("SELECT (SELECT count(*) FROM prompts) - (SELECT count(*) FROM groups)").fetchone()
    return bool(waiting == 0)


def is_run(path: Path) -> bool:
    """The folder of a run; a model's folder has a `config.json` too, of another kind."""
    try:
        document = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and {"base", "config"} <= document.keys()


def going_on(folder: RunDir) -> bool:
    """A supervisor holds the run's lock."""
    try:
        with (folder.path / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def policies(folder: RunDir) -> dict[Version, Path]:
    """Policy folders of the checkpoints by version; of a version saved twice, the later."""
    found = sorted(folder.checkpoints.glob("version-*.*/policy"), key=_order)
    return {_order(path)[0]: path for path in found}


def _order(policy: Path) -> tuple[int, int]:
    version, _, number = policy.parent.name.removeprefix("version-").partition(".")
    return int(version), int(number)
