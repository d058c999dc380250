"""The metrics, groups and trajectories of a run as CSV files: what `dora-rl export RUN --to csv FOLDER` writes.

    metrics.csv        one row for each step: its number, the version it published, the time, and all its metrics
    evaluations.csv    one row for each version that was evaluated
    groups.csv         one row for each group that was admitted, with its outcome
    trajectories.csv   one row for each trajectory

Times are in seconds of the run's clock. A value that does not exist is empty.

Invariants:
- groups and trajectories are read in pages, so memory does not grow with the run, and no reader holds up a run;
- all trajectories in the file belong to groups in the file, also if the run goes on meanwhile;
- a file is complete or not there.
"""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dora_rl.apps import run_reader
from dora_rl.apps.run_reader import open_ledger
from dora_rl.core.errors import UserError
from dora_rl.core.types import SECOND
from dora_rl.runtime.run_dir import RunDir

_PAGE = 5000
_HEAD = ("step", "evaluation", "version", "time")
_GROUP_COLUMNS = (
    "group",
    "prompt",
    "version",
    "admitted_seconds",
    "outcome",
    "step",
    "staleness",
    "published_seconds",
    "failure",
    "equal_reward",
)
_GROUPS = f"""
SELECT groups.id, prompt, version, round(admitted_at / {SECOND}.0, 6),
    CASE WHEN failure IS NOT NULL THEN 'failed' WHEN no_signal IS NOT NULL THEN 'without signal'
        WHEN published_at IS NOT NULL THEN 'trained' WHEN groups.step IS NOT NULL THEN 'in training' ELSE 'open' END,
    groups.step, groups.step - version, round(published_at / {SECOND}.0, 6), failure, no_signal
FROM groups LEFT JOIN steps ON steps.step = groups.step
WHERE groups.id > ? AND groups.id <= ? ORDER BY groups.id LIMIT ?
"""  # noqa: S608  # a constant
_TRAJECTORY_COLUMNS = (
    "trajectory",
    "group",
    "version",
    "step",
    "tokens",
    "reward",
    "failed",
    "attempt",
    "instance",
)
_TRAJECTORIES = """
SELECT trajectories.id, "group", coalesce(trajectories.version, groups.version), groups.step, tokens, reward, failed,
    attempt, instance
FROM trajectories JOIN groups ON groups.id = "group"
WHERE trajectories.id > ? AND "group" <= ? ORDER BY trajectories.id LIMIT ?
"""


def write_tables(folder: RunDir, out: Path) -> dict[str, int]:
    """Write all tables into a folder; returns the number of rows of each file."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        metrics = run_reader.read_metrics(folder)
        with open_ledger(folder) as connection:
            (last,) = connection.execute("SELECT coalesce(max(id), -1) FROM groups").fetchone()
            return {
                "metrics.csv": _write(out / "metrics.csv", *_records(metrics.steps.values())),
                "evaluations.csv": _write(out / "evaluations.csv", *_records(metrics.evaluations.values())),
                "groups.csv": _write(out / "groups.csv", _GROUP_COLUMNS, _rows(connection, _GROUPS, last)),
                "trajectories.csv": _write(
                    out / "trajectories.csv", _TRAJECTORY_COLUMNS, _rows(connection, _TRAJECTORIES, last)
                ),
            }
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from error


def _records(records: Iterable[dict[str, Any]]) -> tuple[list[str], Iterator[Sequence[Any]]]:
    """Columns and rows of records, whose keys may differ."""
    kept = list(records)
    names = dict.fromkeys(name for record in kept for name in record)
    columns = [name for name in _HEAD if name in names] + sorted(name for name in names if name not in _HEAD)
    return columns, ([record.get(name) for name in columns] for record in kept)


def _rows(connection: sqlite3.Connection, query: str, last_group: int) -> Iterator[Sequence[Any]]:
    after = -1
    while page := connection.execute(query, (after, last_group, _PAGE)).fetchall():
        yield from page
        after = page[-1][0]


def _write(file: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> int:
    staged = file.with_name(f".{file.name}.staged")
    count = 0
    try:
        with staged.open("w", encoding="utf-8", newline="") as output:
            writer = csv.writer(output)
            writer.writerow(columns)
            for count, row in enumerate(rows, 1):  # noqa: B007
                writer.writerow(row)
        staged.rename(file)
    finally:
        staged.unlink(missing_ok=True)
    return count
