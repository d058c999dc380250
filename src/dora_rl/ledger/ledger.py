"""The ledger on SQLite, written in batches by a thread of its own.

Invariants:
- what belongs together is written in one transaction: an event, the commands that answered it, the tokens before it;
- a batch is durable when SQLite has forced it to disk; `durable` is the number of the last event in such a batch;
- nothing that can't be undone (an optimiser step, the freeing of a version) begins before the event that asked for it
  is durable; the supervisor calls `sync` and waits for that;
- a write that fails (disk full) is kept and tried again; the run waits and reports it. Nothing is skipped;
- a write that can never succeed (damaged file) sets `failure`; nothing becomes durable after that;
- a read returns what was written or raises `IntegrityError`.

SQLite provides the transactions; only the batching, the chain and the retries are ours.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from dora_rl.core.commands import AnyCommand, Command
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.events import AnyEvent, Event
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Nanoseconds, TrajectoryId
from dora_rl.ledger.run_records import AnyRunRecord, CheckpointSaved, RecordedAt
from dora_rl.ledger.schema import SCHEMA_VERSION, TABLES
from dora_rl.ledger.writer import (
    EventRow,
    LoggedEvent,
    PreparedBatch,
    WriteBatch,
    Writer,
    chain,
    digest,
    events_tail,
    records_tail,
    token_chunk,
)

_EVENT = msgspec.json.Decoder(AnyEvent)
_RECORD = msgspec.json.Decoder(AnyRunRecord)
_COMMANDS = msgspec.json.Decoder(list[AnyCommand])
_TRANSIENT = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
}
"""Errors whose cause can be removed while the run waits."""
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged ledger raises; the second comes from texts, and from SQLite's messages that quote them."""
_SELECT_TOKENS = """
SELECT trajectory, start, version, tokens, logprobs, sampled, experts, expert_layers, experts_per_token, digest
FROM tokens WHERE trajectory = ? ORDER BY start
"""
_SET_SECONDS = "INSERT INTO meta VALUES ('seconds', ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_BATCH_SECONDS = 0.5
"""How long writes are collected: the most generation that a power loss can cost."""
_RETRY_SECONDS = 1.0
_WAL_PAGES = 4000
"""Pages in SQLite's write-ahead log before a checkpoint: a page that changes often is moved once in 16 MB."""


class LedgerError(UserError):
    """A ledger can't be read or written; the message says which and why."""


class SchemaError(LedgerError):
    """A ledger was written by a version of dora-rl that has other tables."""


class Ledger:
    """The ledger of one run, open for writing."""

    def __init__(
        self,
        path: Path,
        group_size: int,
        *,
        mirror: Path | None = None,
        notify: Callable[[], None] = lambda: None,
        open_connection: Callable[[Path], sqlite3.Connection] | None = None,
    ) -> None:
        self._path = path
        self._open_connection = open_connection or connect
        """How the writer opens the ledger."""
        self._mirror = mirror
        """The event log as text for people; an event is added once it is durable."""
        self._group_size = group_size
        self._notify = notify
        """Called from the writer's thread when `durable`, `write_error` or `failure` has changed."""
        self._reader = connect(path, create=True)
        check_pages(self._reader, path)
        self.seq, _ = events_tail(self._reader)
        """Number of the last event."""
        self.durable = self.seq
        """Number of the last event that is on disk."""
        self._last_record, _ = records_tail(self._reader)
        self.checkpoints = {one.record.name for one in self.records() if isinstance(one.record, CheckpointSaved)}
        """Names of all checkpoints that were ever recorded, including those that are not written yet."""
        if mirror is not None:
            self._copy_log(mirror)
        self._append_seconds = self._writer_seconds = 0.0
        self.write_error = ""
        """Why writing fails at the moment; it is tried again."""
        self.failure = ""
        """Why nothing will be written any more."""
        self._earlier_seconds = cpu_seconds(self._reader)
        self._batch = WriteBatch()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._urgent = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def log(self, event: Event, commands: list[Command], at: Nanoseconds) -> int:
        """Write an event and the commands that answered it; returns its number."""
        begin = time.thread_time()
        with self._lock:
            self.seq += 1
            self._batch.events.append(LoggedEvent(self.seq, at, event, commands))
        if not self._work.is_set():
            self._work.set()
        self._append_seconds += time.thread_time() - begin
        return self.seq

    def append_tokens(self, chunks: Sequence[TokenChunk], ended: Sequence[tuple[TrajectoryId, str]]) -> None:
        """Write tokens, and why responses ended, no later than the events that follow from them."""
        begin = time.thread_time()
        with self._lock:
            self._batch.tokens += chunks
            self._batch.ended += ended
        self._append_seconds += time.thread_time() - begin

    def record(self, record: AnyRunRecord, at: Nanoseconds) -> None:
        """Write an input or output of the run."""
        if isinstance(record, CheckpointSaved):
            self.checkpoints.add(record.name)
        with self._lock:
            self._last_record += 1
            self._batch.records.append(RecordedAt(self._last_record, at, record))
        self._work.set()

    def records(self) -> list[RecordedAt]:
        """The run records on disk, each checked against the chain."""
        return list(read_records(self._reader))

    @property
    def seconds(self) -> float:
        """Processor time that the ledger has cost since it was opened: calls of its methods and the writer's thread."""
        return self._append_seconds + self._writer_seconds

    def sync(self) -> None:
        """Write now instead of collecting a batch; `durable` tells when that is done."""
        self._urgent.set()
        self._work.set()

    def close(self) -> None:
        """Write what is left."""
        self._closing = True
        self.sync()
        self._thread.join(timeout=30)
        self._reader.close()

    def events(self) -> Iterator[LoggedEvent]:
        """The event log from its beginning, each entry checked against the chain."""
        yield from read_events(self._reader)

    def check_tables(self) -> None:
        """Raise `IntegrityError` if the tables differ from what the log gives: the run would build on them.

        The log is read a second time rather than kept: the log of a long run would stay in memory until the end.
        """
        from dora_rl.ledger.audit import compare_tables

        try:
            problem = next(compare_tables(self._reader, self.events(), self._group_size), None)
        except DAMAGE as error:
            problem = str(error)
        if problem is not None:
            raise IntegrityError(f"{self._path} is damaged: {problem}; put back a copy of it")

    def trajectory(self, trajectory: TrajectoryId) -> tuple[list[TokenChunk], str | None]:
        """The tokens of a trajectory and why it ended, as far as written; `IntegrityError` if they are damaged."""
        return read_tokens(self._reader, trajectory)

    def _copy_log(self, mirror: Path) -> None:
        """Write the text log from the ledger: after a crash it may be behind, or ahead."""
        with contextlib.suppress(OSError), mirror.open("wb") as file:
            for row in self._reader.execute("SELECT seq, at, event, commands, chain FROM events ORDER BY seq"):
                file.write(EventRow(*row).text())

    # -- the writer's thread ----------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            self._serve(self._open_connection(self._path))
        except Exception as error:  # whatever it is, the supervisor must learn of it
            self.failure = (
                f"the ledger {self._path} can't be written any more ({error}); put back a copy of it and resume the run"
            )
            self._notify()

    def _serve(self, connection: sqlite3.Connection) -> None:
        writer = Writer(connection, self._group_size)
        while True:
            self._work.wait()
            if not self._closing:
                self._urgent.wait(_BATCH_SECONDS)
            self._work.clear()
            self._urgent.clear()
            with self._lock:
                batch, self._batch = self._batch, WriteBatch()
                last = self.seq
            prepared = writer.prepare(batch)
            if self._commit(connection, writer, prepared):
                writer.committed(prepared)
                self.durable = last
                self._notify()
                self._append_to_mirror(prepared.events)
            self._writer_seconds = time.thread_time()
            if self._closing and self._batch == WriteBatch():
                connection.close()
                return

    def _append_to_mirror(self, rows: list[EventRow]) -> None:
        """The text log may lack lines that had no room on disk: it is written again when the ledger is opened."""
        if self._mirror is not None and rows:
            with contextlib.suppress(OSError), self._mirror.open("ab") as file:
                file.write(b"".join([row.text() for row in rows]))

    def _commit(self, connection: sqlite3.Connection, writer: Writer, batch: PreparedBatch) -> bool:
        """Write a batch, however long it takes; False if the run ended before that."""
        while True:
            try:
                with connection:
                    writer.write(batch)
                    connection.execute(_SET_SECONDS, (f"{self._earlier_seconds + self.seconds:.3f}",))
                self.write_error = ""
                return True
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _TRANSIENT:
                    raise
                self.write_error = f"the ledger {self._path} can't be written ({error}); free some space, the run waits"
                self._notify()
                if self._closing:
                    return False
                time.sleep(_RETRY_SECONDS)


def connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """A connection with the ledger's settings, to a ledger of this schema."""
    if not create and not path.exists():
        raise LedgerError(f"there is no ledger {path}")
    try:
        connection = sqlite3.connect(path, check_same_thread=False, timeout=30)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
        if create and _schema(connection) == 0:
            connection.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        else:
            check_schema(connection, path)
    except DAMAGE as error:
        raise LedgerError(f"{path} is damaged or not a ledger: {error}") from error
    return connection


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a ledger that another version of dora-rl has written."""
    version = _schema(connection)
    if version == SCHEMA_VERSION:
        return
    if 0 < version < SCHEMA_VERSION:
        raise SchemaError(
            f"{path} was written by an older version of dora-rl (ledger schema {version}, not {SCHEMA_VERSION}): "
            "runs of older versions can't be resumed or audited with this one"
        )
    raise SchemaError(f"{path} has ledger schema {version}, and this version of dora-rl reads only {SCHEMA_VERSION}")


def _schema(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose pages contradict each other."""
    try:
        found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
    except DAMAGE as error:
        found = [str(error)]
    if found != ["ok"]:
        raise LedgerError(f"{path} is damaged: {found[0]}; put back a copy of it")


def read_events(connection: sqlite3.Connection) -> Iterator[LoggedEvent]:
    """The event log, each entry checked against the chain; raises `IntegrityError` where it was changed."""
    last, link = 0, b""
    try:
        for seq, at, event, commands, claimed in connection.execute("SELECT * FROM events ORDER BY seq"):
            link = chain(link, seq, at, event, commands)
            if seq != last + 1 or link != claimed:
                raise IntegrityError(f"the event log is not what was written: event {last + 1} was changed or removed")
            last = seq
            yield LoggedEvent(seq, at, _EVENT.decode(event), _COMMANDS.decode(commands))
    except (*DAMAGE, msgspec.DecodeError, TypeError) as error:
        raise IntegrityError(f"the event log is damaged after event {last}: {error}") from error


def read_records(connection: sqlite3.Connection) -> Iterator[RecordedAt]:
    """The run records, each checked against the chain; raises `IntegrityError` where they were changed."""
    last, link = 0, b""
    try:
        for number, at, record, claimed in connection.execute("SELECT * FROM records ORDER BY number"):
            link = chain(link, number, at, record, b"")
            if number != last + 1 or link != claimed:
                raise IntegrityError(
                    f"the run records are not what was written: record {last + 1} was changed or removed"
                )
            last = number
            yield RecordedAt(number, at, _RECORD.decode(record))
    except (*DAMAGE, msgspec.DecodeError, TypeError) as error:
        raise IntegrityError(f"the run records are damaged after record {last}: {error}") from error


def read_tokens(connection: sqlite3.Connection, trajectory: TrajectoryId) -> tuple[list[TokenChunk], str | None]:
    """The tokens of a trajectory and why it ended; raises `IntegrityError` where they are not what was written."""
    chunks = []
    try:
        for *row, claimed in connection.execute(_SELECT_TOKENS, (trajectory,)):
            if digest(row) != claimed:
                raise IntegrityError(f"the tokens of trajectory {trajectory} at {row[1]} are not what was written")
            chunks.append(token_chunk(row))
        ended = connection.execute("SELECT * FROM ended WHERE trajectory = ?", (trajectory,)).fetchone()
    except (*DAMAGE, TypeError) as error:
        raise IntegrityError(f"the tokens of trajectory {trajectory} are damaged: {error}") from error
    if ended is not None and digest(ended[:-1]) != ended[-1]:
        raise IntegrityError(f"why trajectory {trajectory} ended is not what was written")
    return chunks, ended[1] if ended else None


def cpu_seconds(connection: sqlite3.Connection) -> float:
    """Processor seconds that the ledger has cost the run so far."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'seconds'").fetchone()
    return float(found[0]) if found else 0.0
