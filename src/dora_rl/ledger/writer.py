"""A batch for the ledger, and the few statements that write it.

Invariants:
- a batch is written in one transaction, so the order inside it is free as long as a row comes after those that it
  refers to, and changes to one row keep their order;
- tokens of a trajectory that follow each other become one row;
- the tokens of groups that no checkpoint can ask for again are deleted, and nothing else.
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
from dora_rl.ledger.notes import Noted
from dora_rl.ledger.tables import BARRIERS, GENERATED, INSERTS, SCORED, Statement, derive

_JSON = msgspec.json.Encoder()
_PACK = msgspec.msgpack.Encoder()
_EVENT = "INSERT INTO events VALUES (?, ?, ?, ?, ?)"
_NOTE = "INSERT INTO notes VALUES (?, ?, ?, ?)"
_TOKENS = "INSERT OR IGNORE INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ENDED = "INSERT OR IGNORE INTO ended VALUES (?, ?, ?)"
_FORGET = tuple(f"DELETE FROM {table} WHERE trajectory >= ? AND trajectory < ?" for table in ("tokens", "ended"))  # noqa: S608
_TRAINED = """
SELECT step, id FROM groups
WHERE step IS NOT NULL AND id >= (SELECT min(trajectory) FROM (SELECT min(trajectory) AS trajectory FROM tokens
UNION ALL SELECT min(trajectory) FROM ended)) / ?
"""


class Line(NamedTuple):
    """What the event log is to say."""

    seq: int
    at: Nanoseconds
    event: e.Event
    commands: list[c.Command]


class NoteRow(NamedTuple):
    """A note as it is written."""

    number: int
    at: Nanoseconds
    note: bytes
    chain: bytes


class EventRow(NamedTuple):
    """A line of the event log as it is written."""

    seq: int
    at: Nanoseconds
    event: bytes
    commands: bytes
    chain: bytes

    def text(self) -> bytes:
        """For people."""
        return b'{"seq":%d,"at":%d,"event":%s,"commands":%s}\n' % self[:4]


@dataclass(slots=True)
class WriteBatch:
    """What is written together."""

    lines: list[Line] = field(default_factory=list)
    tokens: list[TokenChunk] = field(default_factory=list)
    ended: list[tuple[TrajectoryId, str]] = field(default_factory=list)
    notes: list[Noted] = field(default_factory=list)


class Writer:
    """Turns batches into rows; knows which groups were trained and still have their tokens in the ledger."""

    def __init__(self, connection: sqlite3.Connection, group_size: int) -> None:
        self._connection = connection
        self._chain = tail(connection)[1]
        self._notes_chain = notes_tail(connection)[1]
        self._group_size = group_size
        self._trained: dict[StepId, set[GroupId]] = {}
        for step, group in connection.execute(_TRAINED, (group_size,)):
            self._trained.setdefault(step, set()).add(group)

    def rows(self, lines: list[Line]) -> list[EventRow]:
        """The lines as rows of the event log, each chained to those before it: to be asked for once."""
        rows = []
        for seq, at, event, commands in lines:
            event_json, commands_json = _JSON.encode(event), _JSON.encode(commands)
            self._chain = chain(self._chain, seq, at, event_json, commands_json)
            rows.append(EventRow(seq, at, event_json, commands_json, self._chain))
        return rows

    def note_rows(self, notes: list[Noted]) -> list[NoteRow]:
        """The notes as rows, each chained to those before it: to be asked for once."""
        rows = []
        for number, at, note in notes:
            body = _JSON.encode(note)
            self._notes_chain = chain(self._notes_chain, number, at, body, b"")
            rows.append(NoteRow(number, at, body, self._notes_chain))
        return rows

    def write(self, batch: WriteBatch, rows: list[EventRow], notes: list[NoteRow]) -> None:
        """To be called in a transaction; if that fails, it is called again with the same batch."""
        many = self._connection.executemany
        many(_EVENT, rows)
        many(_NOTE, notes)
        first, rest = self._changes(batch.lines)
        for statement in INSERTS:
            if statement in first:
                many(statement, first[statement])
        many(_TOKENS, [(*row, digest(row)) for row in token_rows(batch.tokens)])
        many(_ENDED, [(*row, digest(row)) for row in batch.ended])
        for statement, changes in itertools.groupby(gathered(rest), operator.itemgetter(0)):
            many(statement, [values for _, values in changes])
        self._forget(batch.lines)

    def _changes(self, lines: list[Line]) -> tuple[dict[str, list[tuple[Any, ...]]], list[Statement]]:
        """New rows by statement, and the changes to rows in order."""
        first: dict[str, list[tuple[Any, ...]]] = {}
        rest = []
        for line in lines:
            for statement, values in derive(line.event, line.commands, line.at, self._group_size):
                if statement in INSERTS:
                    first.setdefault(statement, []).append(values)
                else:
                    rest.append((statement, values))
        return first, rest

    def _forget(self, lines: list[Line]) -> None:
        """No trainer will ask for what was trained before a checkpointed version again."""
        upto = 0
        for line in lines:
            for command in line.commands:
                if isinstance(command, c.Apply):
                    self._trained.setdefault(command.step, set()).update(command.groups)
            if isinstance(line.event, e.Checkpointed):
                upto = max(upto, line.event.version)
        over = [step for step in self._trained if step < upto]
        size = self._group_size
        ranges = [(group * size, (group + 1) * size) for step in over for group in self._trained[step]]
        for statement in _FORGET:
            self._connection.executemany(statement, ranges)

    def written(self, batch: WriteBatch) -> None:
        """The batch is on disk: what it has deleted need not be known any more."""
        upto = max((line.event.version for line in batch.lines if isinstance(line.event, e.Checkpointed)), default=0)
        for step in [step for step in self._trained if step < upto]:
            del self._trained[step]


def gathered(changes: Iterable[Statement]) -> Iterator[Statement]:
    """The same changes with reports of trajectories, which most are, brought together as far as their order is free."""
    reports: dict[str, list[Statement]] = {GENERATED: [], SCORED: []}
    for change in changes:
        if change[0] in reports:
            reports[change[0]].append(change)
            continue
        if change[0] in BARRIERS:
            for kept in reports.values():
                yield from kept
                kept.clear()
        yield change
    for kept in reports.values():
        yield from kept


def token_rows(chunks: Iterable[TokenChunk]) -> Iterator[tuple[Any, ...]]:
    """The chunks as rows of the table `tokens` without their digests, with chunks that follow each other as one row."""
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
    """The chunk of a row that `token_rows` gave; the attempt is not stored."""
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
    """Of a row that nothing else vouches for."""
    return hashlib.blake2b(_PACK.encode(row), digest_size=8).digest()


def chain(before: bytes, seq: int, at: int, event: bytes, commands: bytes) -> bytes:
    """The digest of a line and all before it."""
    return hashlib.blake2b(b"%b%d %d %d %b%b" % (before, seq, at, len(event), event, commands), digest_size=16).digest()


def tail(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the chain of the last line that is written."""
    found: tuple[Any, ...] | None = connection.execute(
        "SELECT seq, chain FROM events ORDER BY seq DESC LIMIT 1"
    ).fetchone()
    return (int(found[0]), bytes(found[1])) if found else (0, b"")


def notes_tail(connection: sqlite3.Connection) -> tuple[int, bytes]:
    """The number and the chain of the last note that is written."""
    found: tuple[Any, ...] | None = connection.execute(
        "SELECT number, chain FROM notes ORDER BY number DESC LIMIT 1"
    ).fetchone()
    return (int(found[0]), bytes(found[1])) if found else (0, b"")
