"""The ledger on SQLite, written in batches by a thread of its own.

Invariants:
- what belongs together is written in one transaction: an event, the commands that answered it, the tokens before it;
- a batch counts as durable when SQLite has forced it to disk; `durable` is the last event of which that is true;
- nothing that can't be undone (an optimiser step, a version freed) is begun before the event that asked for it is
  durable; the runtime waits for that with `sync`;
- a write that fails (disk full) is kept and tried again; the run waits and says so. Nothing is skipped;
- a write that can never succeed (damaged file) is `failure`; nothing is durable from then on;
- what is read is what was written, or `IntegrityError`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dora_rl.core.commands import AnyCommand, Command
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.events import AnyEvent, Event
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Nanoseconds, TrajectoryId
from dora_rl.ledger.notes import AnyNote, CheckpointSaved, Noted
from dora_rl.ledger.schema import SCHEMA_VERSION, TABLES
from dora_rl.ledger.writer import (
    EventRow,
    Line,
    NoteRow,
    WriteBatch,
    Writer,
    chain,
    digest,
    notes_tail,
    tail,
    token_chunk,
)

_EVENT = msgspec.json.Decoder(AnyEvent)
_NOTE = msgspec.json.Decoder(AnyNote)
_COMMANDS = msgspec.json.Decoder(list[AnyCommand])
_PASSING = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
}
"""Errors that somebody can mend while the run waits."""
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged ledger raises. The second comes of texts, and of SQLite's own words that quote them."""
_SELECT_TOKENS = """
SELECT trajectory, start, version, tokens, logprobs, sampled, experts, expert_layers, experts_per_token, digest
FROM tokens WHERE trajectory = ? ORDER BY start
"""
_SECONDS = "INSERT INTO meta VALUES ('seconds', ?) ON CONFLICT DO UPDATE SET value = excluded.value"
_GATHER = 0.5
"""Seconds for which writes are gathered: the most generation that a power loss can cost."""
_RETRY = 1.0
_WAL_PAGES = 4000
"""Pages in the log of SQLite before they go to their places: a page that changes often goes there once in 16 MB."""


class LedgerError(UserError):
    """A ledger can't be read or written; the message says which and why."""


class SchemaError(LedgerError):
    """A ledger was written by a version of dora-rl that has other tables."""


class Logged(NamedTuple):
    """One line of the event log."""

    seq: int
    at: Nanoseconds
    event: AnyEvent
    commands: list[AnyCommand]


class Ledger:
    """The ledger of one run, open for writing."""

    def __init__(
        self,
        path: Path,
        group_size: int,
        *,
        mirror: Path | None = None,
        woken: Callable[[], None] = lambda: None,
        opened: Callable[[Path], sqlite3.Connection] | None = None,
    ) -> None:
        self._path = path
        self._opened = opened or connect
        """How the writer opens the ledger."""
        self._mirror = mirror
        """The event log for people, written after it is durable."""
        self._group_size = group_size
        self._woken = woken
        """Called from the writer's thread whenever `durable` has grown."""
        self._reader = connect(path, create=True)
        check_pages(self._reader, path)
        self.seq, _ = tail(self._reader)
        self.durable = self.seq
        self._noted, _ = notes_tail(self._reader)
        self.checkpoints = {one.note.name for one in self.notes() if isinstance(one.note, CheckpointSaved)}
        """Names of the checkpoints that were ever noted, also if they are not written yet."""
        if mirror is not None:
            self._copy(mirror)
        self._handing = self._writing = 0.0
        self.trouble = ""
        """Why nothing can be written just now."""
        self.failure = ""
        """Why nothing will be written any more."""
        self._before = spent(self._reader)
        self._batch = WriteBatch()
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._urgent = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="ledger", daemon=True)
        self._thread.start()

    def log(self, event: Event, commands: list[Command], at: Nanoseconds) -> int:
        """Write down an event and what it was answered with; its number."""
        begin = time.thread_time()
        with self._lock:
            self.seq += 1
            self._batch.lines.append(Line(self.seq, at, event, commands))
        if not self._work.is_set():
            self._work.set()
        self._handing += time.thread_time() - begin
        return self.seq

    def append_tokens(self, chunks: Sequence[TokenChunk], ended: Sequence[tuple[TrajectoryId, str]]) -> None:
        """Write tokens, and why responses ended, no later than the events that follow from them."""
        begin = time.thread_time()
        with self._lock:
            self._batch.tokens += chunks
            self._batch.ended += ended
        self._handing += time.thread_time() - begin

    def note(self, note: AnyNote, at: Nanoseconds) -> None:
        """Write down what the run is made from, or has made."""
        if isinstance(note, CheckpointSaved):
            self.checkpoints.add(note.name)
        with self._lock:
            self._noted += 1
            self._batch.notes.append(Noted(self._noted, at, note))
        self._work.set()

    def notes(self) -> list[Noted]:
        """The notes that are written, each checked against the chain."""
        return list(read_notes(self._reader))

    @property
    def seconds(self) -> float:
        """Of processor time spent on the ledger since it was opened: handing over, and all of the writer's thread."""
        return self._handing + self._writing

    def sync(self) -> None:
        """Write at once, rather than when a batch has gathered; `durable` says when it is done."""
        self._urgent.set()
        self._work.set()

    def close(self) -> None:
        """Write what is left."""
        self._closing = True
        self.sync()
        self._thread.join(timeout=30)
        self._reader.close()

    def events(self) -> Iterator[Logged]:
        """The event log from its beginning, each line checked against the chain."""
        yield from read_events(self._reader)

    def compare(self) -> None:
        """Refuse tables that are not what the log says: they would be written on.

        The log is read once more rather than kept: what a long run has logged would never leave the memory again.
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

    def _copy(self, mirror: Path) -> None:
        """Make the event log for people what the ledger says: a crash may have left it behind, or ahead."""
        with contextlib.suppress(OSError), mirror.open("wb") as file:
            for row in self._reader.execute("SELECT seq, at, event, commands FROM events ORDER BY seq"):
                file.write(b'{"seq":%d,"at":%d,"event":%s,"commands":%s}\n' % row)

    # -- the writer's thread ----------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            self._serve(self._opened(self._path))
        except Exception as error:  # whatever it is, the run must hear of it
            self.failure = (
                f"the ledger {self._path} can't be written any more ({error}); put back a copy of it and resume the run"
            )
            self._woken()

    def _serve(self, connection: sqlite3.Connection) -> None:
        writer = Writer(connection, self._group_size)
        while True:
            self._work.wait()
            if not self._closing:
                self._urgent.wait(_GATHER)
            self._work.clear()
            self._urgent.clear()
            with self._lock:
                batch, self._batch = self._batch, WriteBatch()
                upto = self.seq
            rows, notes = writer.rows(batch.lines), writer.note_rows(batch.notes)
            if self._commit(connection, writer, batch, rows, notes):
                writer.written(batch)
                self.durable = upto
                self._woken()
                self._show(rows)
            self._writing = time.thread_time()
            if self._closing and self._batch == WriteBatch():
                connection.close()
                return

    def _show(self, rows: list[EventRow]) -> None:
        """The log for people is made anew whenever the ledger is opened, so it may lack what there is no room for."""
        if self._mirror is not None and rows:
            with contextlib.suppress(OSError), self._mirror.open("ab") as file:
                file.write(b"".join([row.text() for row in rows]))

    def _commit(
        self,
        connection: sqlite3.Connection,
        writer: Writer,
        batch: WriteBatch,
        rows: list[EventRow],
        notes: list[NoteRow],
    ) -> bool:
        """Write a batch, however long it takes; False if the end of the run came first."""
        while True:
            try:
                with connection:
                    writer.write(batch, rows, notes)
                    connection.execute(_SECONDS, (f"{self._before + self.seconds:.3f}",))
                self.trouble = ""
                return True
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _PASSING:
                    raise
                self.trouble = f"the ledger {self._path} can't be written ({error}); free some space, the run waits"
                self._woken()
                if self._closing:
                    return False
                time.sleep(_RETRY)


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


def read_events(connection: sqlite3.Connection) -> Iterator[Logged]:
    """The event log, each line checked against the chain; raises `IntegrityError` where it was tampered with."""
    last, link = 0, b""
    try:
        for seq, at, event, commands, claimed in connection.execute("SELECT * FROM events ORDER BY seq"):
            link = chain(link, seq, at, event, commands)
            if seq != last + 1 or link != claimed:
                raise IntegrityError(f"the event log is not what was written: event {last + 1} was changed or removed")
            last = seq
            yield Logged(seq, at, _EVENT.decode(event), _COMMANDS.decode(commands))
    except (*DAMAGE, msgspec.DecodeError, TypeError) as error:
        raise IntegrityError(f"the event log is damaged after event {last}: {error}") from error


def read_notes(connection: sqlite3.Connection) -> Iterator[Noted]:
    """The run's notes, each checked against the chain; raises `IntegrityError` where they were tampered with."""
    last, link = 0, b""
    try:
        for number, at, note, claimed in connection.execute("SELECT * FROM notes ORDER BY number"):
            link = chain(link, number, at, note, b"")
            if number != last + 1 or link != claimed:
                raise IntegrityError(f"the notes of the run are not what was written: note {last + 1} was changed")
            last = number
            yield Noted(number, at, _NOTE.decode(note))
    except (*DAMAGE, msgspec.DecodeError, TypeError) as error:
        raise IntegrityError(f"the notes of the run are damaged after note {last}: {error}") from error


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


def spent(connection: sqlite3.Connection) -> float:
    """Seconds that the ledger has cost so far."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'seconds'").fetchone()
    return float(found[0]) if found else 0.0
