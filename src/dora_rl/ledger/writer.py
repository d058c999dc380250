"""Turns a batch for the ledger into rows, and writes them with a few statements.

Invariants:
- a batch is written in one transaction, so statements in it may be reordered as long as a row comes after the rows that
  it refers to, and updates of one row keep their order;
- chunks of a trajectory that follow each other in a batch become one row;
- the tokens of groups that no checkpoint can need again are deleted, and nothing else is.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk, joined
from dora_rl.core.types import GroupId, Nanoseconds, StepId, TrajectoryId
from dora_rl.ledger.run_records import RecordedAt
from dora_rl.ledger.tables import BARRIERS, GENERATED, INSERTS, SCORED, Statement, TableProjection
from dora_rl.ledger.token_retention import TokenRetention

_JSON = msgspec.json.Encoder()
_PACK = msgspec.msgpack.Encoder()
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
_RECORD = "INSERT INTO records VALUES (?, ?, ?, ?)"
_TOKENS = "INSERT OR IGNORE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ENDED = "INSERT OR IGNORE INTO ended VALUES (?, ?, ?)"
_DELETE = tuple(f"DELETE FROM {table} WHERE trajectory >= ? AND trajectory < ?" for table in ("tokens", "ended"))  # noqa: S608
_TRAINED = """
SELECT step, id FROM groups
WHERE step IS NOT NULL AND id >= (SELECT min(trajectory) FROM (SELECT min(trajectory) AS trajectory FROM tokens
UNION ALL SELECT min(trajectory) FROM ended)) / ?
"""

Row = tuple[Any, ...]


class LoggedEvent(NamedTuple):
    """One entry of the event log."""

    seq: int
    at: Nanoseconds
    event: e.Event
    commands: Sequence[c.Command]
    """The orchestrator's answer to the event."""


class EventRow(NamedTuple):
    """A row of the table `events`."""

    seq: int
    at: Nanoseconds
    event: bytes
    commands: bytes
    chain: bytes

    def text(self) -> bytes:
        """The row as a line of `events.jsonl`."""
        return b'{"seq":%d,"at":%d,"event":%s,"commands":%s}\n' % self[:4]


class RecordRow(NamedTuple):
    """A row of the table `records`."""

    number: int
    at: Nanoseconds
    record: bytes
    chain: bytes


@dataclass(slots=True)
class WriteBatch:
    """What is written in one transaction."""

    events: list[LoggedEvent] = field(default_factory=list)
    tokens: list[TokenChunk] = field(default_factory=list)
    ended: list[tuple[TrajectoryId, str]] = field(default_factory=list)
    records: list[RecordedAt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch as rows and statements: it can be written again if the transaction fails."""

    events: list[EventRow]
    records: list[RecordRow]
    tokens: list[Row]
    ended: list[Row]
    inserts: dict[str, list[Row]]
    """New rows of the other tables, by statement."""
    updates: list[Statement]
    """Updates of the other tables, in order."""
    released: list[StepId]
    """Steps whose tokens are deleted: they are in a checkpoint."""
    without_signal: list[GroupId]
    """Groups whose tokens are deleted: they won't be trained."""


class Writer:
    """Writes batches, and deletes the tokens that are no longer needed."""

    def __init__(self, connection: sqlite3.Connection, group_size: int) -> None:
        self._connection = connection
        self._events_chain = events_tail(connection)[1]
        self._records_chain = records_tail(connection)[1]
        self._tables = TableProjection(group_size)
        self._group_size = group_size
        self._retention = TokenRetention(connection.execute(_TRAINED, (group_size,)))

    def prepare(self, batch: WriteBatch) -> PreparedBatch:
        """Turn a batch into rows. Call this once per batch, in order: rows are chained to the rows before them."""
        for entry in batch.events:
            self._tables.apply(entry.event, entry.commands, entry.at)
            self._retention.apply(entry.event, entry.commands, entry.at)
        inserts, updates = self._table_changes()
        return PreparedBatch(
            events=self._event_rows(batch.events),
            records=self._record_rows(batch.records),
            tokens=[(*row, digest(row)) for row in token_rows(batch.tokens)],
            ended=[(*row, digest(row)) for row in batch.ended],
            inserts=inserts,
            updates=updates,
            released=self._retention.released(),
            without_signal=self._retention.take_without_signal(),
        )

    def write(self, batch: PreparedBatch) -> None:
        """Execute the statements of a batch. Call this in a transaction; if that fails, call it again."""
        many = self._connection.executemany
        many(_EVENT, batch.events)
        many(_RECORD, batch.records)
        for statement in INSERTS:
            if statement in batch.inserts:
                many(statement, batch.inserts[statement])
        many(_TOKENS, batch.tokens)
        many(_ENDED, batch.ended)
        for statement, updates in itertools.groupby(batch.updates, operator.itemgetter(0)):
            many(statement, [values for _, values in updates])
        size, groups = self._group_size, self._retention.groups
        needless = [*batch.without_signal, *(group for step in batch.released for group in groups(step))]
        ranges = [(group * size, (group + 1) * size) for group in needless]
        for statement in _DELETE:
            many(statement, ranges)

    def committed(self, batch: PreparedBatch) -> None:
        """The batch is on disk: forget the groups whose tokens it has deleted."""
        for step in batch.released:
            self._retention.forget(step)

    def _event_rows(self, entries: list[LoggedEvent]) -> list[EventRow]:
        rows = []
        for seq, at, event, commands in entries:
            event_json, commands_json = _JSON.encode(event), _JSON.encode(commands)
            self._events_chain = chain(self._events_chain, seq, at, event_json, commands_json)
            rows.append(EventRow(seq, at, event_json, commands_json, self._events_chain))
        return rows

    def _record_rows(self, records: list[RecordedAt]) -> list[RecordRow]:
        rows = []
        for number, at, record in records:
            body = _JSON.encode(record)
            self._records_chain = chain(self._records_chain, number, at, body, b"")
            rows.append(RecordRow(number, at, body, self._records_chain))
        return rows

    def _table_changes(self) -> tuple[dict[str, list[Row]], list[Statement]]:
        """New rows by statement, and the updates in order."""
        inserts: dict[str, list[Row]] = {}
        updates = []
        for statement, values in self._tables.take():
            if statement in INSERTS:
                inserts.setdefault(statement, []).append(values)
            else:
                updates.append((statement, values))
        return inserts, list(reordered(updates))


def reordered(updates: Iterable[Statement]) -> Iterator[Statement]:
    """The same updates with reports of trajectories, which most of them are, next to each other where order is free."""
    reports: dict[str, list[Statement]] = {GENERATED: [], SCORED: []}
    for update in updates:
        if update[0] in reports:
            reports[update[0]].append(update)
            continue
        if update[0] in BARRIERS:
            for waiting in reports.values():
                yield from waiting
                waiting.clear()
        yield update
    for waiting in reports.values():
        yield from waiting


def token_rows(chunks: Iterable[TokenChunk]) -> Iterator[Row]:
    """The chunks as rows of the table `tokens` without their digests; chunks that follow each other become one row."""
    by_trajectory: dict[TrajectoryId, list[TokenChunk]] = {}
    for chunk in chunks:
        by_trajectory.setdefault(chunk.trajectory, []).append(chunk.for_training())
    for own in by_trajectory.values():
        for chunk in joined(own):
            yield (
                chunk.trajectory,
                chunk.start,
                chunk.version,
                chunk.token_data,
                chunk.logprob_data,
                int(chunk.sampled),
                chunk.expert_data,
                *chunk.expert_shape,
            )


def token_chunk(row: Sequence[Any]) -> TokenChunk:
    """The chunk of a row that `token_rows` made. The attempt is not stored, so it is 0."""
    trajectory, start, version, tokens, logprobs, sampled, experts, layers, per_token = row
    return TokenChunk(
        trajectory=trajectory,
        start=start,
        version=version,
        token_data=tokens,
        logprob_data=logprobs,
        sampled=bool(sampled),
        expert_data=experts,
        expert_shape=(layers, per_token),
    )


def digest(row: Sequence[Any]) -> bytes:
    """The digest of a row that is in no chain."""
    return hashlib.blake2b(_PACK.encode(row), digest_size=8).digest()


def chain(before: bytes, seq: int, at: int, event: bytes, commands: bytes) -> bytes:
    """The digest of a row and, through the chain of the row before it, of all rows before it."""
    return hashlib.blake2b(b"%b%d %d %d %b%b" % (before, seq, at, len(event), event, commands), digest_size=16).digest()


def events_tail(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the chain of the last event in the ledger."""
    return _tail(connection, "SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1")


def records_tail(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the chain of the last run record in the ledger."""
    return _tail(connection, "SELECT number, chain FROM records ORDER BY number DESC LIMIT 1")


def _tail(connection: sqlite3.Connection, query: str) -> tuple[int, bytes]:
    last: Row | None = connection.execute(query).fetchone()
    return (int(last[0]), bytes(last[1])) if last else (0, b"")
