"""Reads the ledger of a run as typed rows, whether the run is finished, stopped or going on.

Invariants:
- nothing is ever written: connections are read-only, and no file is created beside the ledger;
- each reader sees one snapshot of the ledger, that of the moment in which its first row is read;
- events and tokens are checked against their digests when they are read; `verify` also checks everything else.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dora_rl.core.errors import IntegrityError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Fingerprint, GroupId, InstanceId, Nanoseconds, StepId, TrajectoryId, Version
from dora_rl.ledger.audit import compare_tables
from dora_rl.ledger.ledger import (
    DAMAGE,
    LedgerError,
    check_pages,
    check_schema,
    read_events,
    read_records,
    read_tokens,
)
from dora_rl.ledger.run_records import Configured
from dora_rl.ledger.writer import LoggedEvent

_GROUPS = """
SELECT groups.id, prompt, version, admitted_at, groups.step, published_at IS NOT NULL, failure, no_signal
FROM groups LEFT JOIN steps ON steps.step = groups.step
"""
_TRAJECTORIES = """
SELECT id, "group", attempt, instance, version, fingerprint, tokens, reward, failed FROM trajectories
"""
_CONSERVATION = """
SELECT count(*), count(published_at), count(failure), count(no_signal),
    coalesce(sum(published_at IS NULL AND failure IS NULL AND no_signal IS NULL), 0)
FROM groups LEFT JOIN steps ON steps.step = groups.step
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One group: all trajectories of one prompt."""

    id: GroupId
    prompt: str
    """The key of its prompt."""
    version: Version
    admitted_at: Nanoseconds
    step: StepId | None
    """The step whose batch has the group."""
    published: bool
    """That step is complete: its version is published."""
    failure: str | None
    """Why the group could not be trained."""
    no_signal: float | None
    """The reward of all its trajectories, if the group ended without signal."""

    @property
    def outcome(self) -> Literal["trained", "failed", "without signal", "live"]:
        """How the group ended; `live` if it has not."""
        if self.published:
            return "trained"
        if self.failure is not None:
            return "failed"
        return "live" if self.no_signal is None else "without signal"

    @property
    def staleness(self) -> int | None:
        """The step that trains the group minus its version."""
        return None if self.step is None else self.step - self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """One trajectory; what is not known yet is None."""

    id: TrajectoryId
    group: GroupId
    attempt: int
    """How often it was resumed from its tokens."""
    instance: InstanceId | None
    """The instance that it was started on last, or ended on."""
    version: Version | None
    """The version that generated it, as the engine reported."""
    fingerprint: Fingerprint | None
    """The weights that generated it."""
    tokens: int | None
    """Length of the response."""
    reward: float | None
    failure: str | None
    """Why it was not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One training step."""

    step: StepId
    groups: tuple[GroupId, ...]
    applied_at: Nanoseconds
    """When its batch was complete."""
    published_at: Nanoseconds | None
    """When its version, `step + 1`, could be loaded."""
    fingerprint: Fingerprint | None
    """The weights of that version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conservation:
    """Groups by outcome: every admitted group is trained once, fails, ends without signal, or is live."""

    admitted: int
    trained: int
    failed: int
    without_signal: int
    live: int

    @property
    def holds(self) -> bool:
        """Whether each group has exactly one outcome: a group with two is counted twice."""
        return self.admitted == self.trained + self.failed + self.without_signal + self.live


class LedgerReader:
    """The ledger in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading():
            pass

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that the run began with, as a tree."""
        with self._reading() as connection:
            return self._settings(connection)

    def groups(self, step: StepId | None = None) -> Iterator[GroupRow]:
        """All groups in the order of their admission, or those in the batch of one step."""
        where = "" if step is None else "WHERE groups.step = ?"
        for row in self._rows(f"{_GROUPS} {where} ORDER BY groups.id", () if step is None else (step,)):
            number, prompt, version, admitted_at, of_step, published, failure, no_signal = row
            yield GroupRow(
                id=number,
                prompt=prompt,
                version=version,
                admitted_at=admitted_at,
                step=of_step,
                published=bool(published),
                failure=failure,
                no_signal=no_signal,
            )

    def trajectories(self, group: GroupId | None = None) -> Iterator[TrajectoryRow]:
        """All trajectories in the order of their ids, or those of one group."""
        where = "" if group is None else 'WHERE "group" = ?'
        for row in self._rows(f"{_TRAJECTORIES} {where} ORDER BY id", () if group is None else (group,)):
            number, of_group, attempt, instance, version, fingerprint, tokens, reward, failure = row
            yield TrajectoryRow(
                id=number,
                group=of_group,
                attempt=attempt,
                instance=instance,
                version=version,
                fingerprint=fingerprint,
                tokens=tokens,
                reward=reward,
                failure=failure,
            )

    def steps(self) -> Iterator[StepRow]:
        """All steps whose batch is complete, in order."""
        with self._reading() as connection:
            batches: dict[StepId, list[GroupId]] = {}
            for group, step in connection.execute("SELECT id, step FROM groups WHERE step IS NOT NULL ORDER BY id"):
                batches.setdefault(step, []).append(group)
            query = "SELECT step, applied_at, published_at, fingerprint FROM steps ORDER BY step"
            for step, applied_at, published_at, fingerprint in connection.execute(query):
                yield StepRow(
                    step=step,
                    groups=tuple(batches.get(step, ())),
                    applied_at=applied_at,
                    published_at=published_at,
                    fingerprint=fingerprint,
                )

    def events(self) -> Iterator[LoggedEvent]:
        """The event log from its beginning, with the commands that answered each event; `IntegrityError` if an entry
        is not what was written."""
        with self._reading() as connection:
            yield from read_events(connection)

    def tokens(self, trajectory: TrajectoryId) -> list[TokenChunk]:
        """The tokens of a trajectory with their log-probs; empty once a checkpoint contains the step that trained it.
        `IntegrityError` if they are not what was written."""
        with self._reading() as connection:
            return read_tokens(connection, trajectory)[0]

    def conservation(self) -> Conservation:
        """Count the groups by outcome."""
        with self._reading() as connection:
            admitted, trained, failed, without_signal, live = connection.execute(_CONSERVATION).fetchone()
        return Conservation(admitted=admitted, trained=trained, failed=failed, without_signal=without_signal, live=live)

    def verify(self) -> list[str]:
        """Check all digests and derive the tables from the log again; what is not as it was written, one sentence each.

        An empty list means that the ledger is intact. Whether the run has kept its promises is another question, which
        `dora-rl audit` answers.
        """
        problems: list[str] = []
        with self._reading() as connection:
            try:
                check_pages(connection, self.path)
                problems += _damage(connection, int(self._settings(connection)["control"]["group_size"]))
            except (LedgerError, IntegrityError, KeyError, *DAMAGE) as error:
                problems.append(f"{self.path} is damaged: {error}")
        return problems

    def _settings(self, connection: sqlite3.Connection) -> dict[str, Any]:
        for one in read_records(connection):
            if isinstance(one.record, Configured):
                return one.record.config
        raise LedgerError(f"{self.path} has no configuration yet: its run has not begun")

    def _rows(self, query: str, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        with self._reading() as connection:
            yield from connection.execute(query, values)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(connect_read_only(self.path)) as connection:
                connection.execute("BEGIN")  # one snapshot: the run may be going on
                yield connection
        except DAMAGE as error:
            raise LedgerError(f"the ledger {self.path} can't be read: {error}") from error


def connect_read_only(path: Path) -> sqlite3.Connection:
    """A connection that can't write, to a ledger of this schema that a run may be writing."""
    if not path.exists():
        raise LedgerError(f"there is no ledger {path}")
    # Without a write-ahead log no process writes the ledger, and it can be read without creating one.
    immutable = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro{immutable}", uri=True, timeout=30)
    try:
        check_schema(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _damage(connection: sqlite3.Connection, group_size: int) -> Iterator[str]:
    """What is not as it was written: in the log and the tables derived from it, in the run records, in the tokens."""
    try:
        yield from compare_tables(connection, read_events(connection), group_size)
    except IntegrityError as error:
        yield str(error)
    try:
        for _ in read_records(connection):
            pass
    except IntegrityError as error:
        yield str(error)
    stored = connection.execute("SELECT trajectory FROM tokens UNION SELECT trajectory FROM ended").fetchall()
    for (trajectory,) in stored:
        try:
            read_tokens(connection, trajectory)
        except IntegrityError as error:
            yield str(error)
