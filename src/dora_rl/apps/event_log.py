"""Reads the event log of a run in order, also while the run writes it.

Invariants:
- nothing is written, and no reader holds up the run: the log is read in pages, each in a transaction of its own, so
  that SQLite can recycle its write-ahead log in between;
- an event that was read once is never changed, so a reader may go on where it stopped (`after`).

`dora-rl audit` checks the digests of the log; a reader that only shows it does not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import msgspec

from dora_rl.core.commands import AnyCommand
from dora_rl.core.events import AnyEvent
from dora_rl.core.types import Nanoseconds
from dora_rl.ledger.writer import LoggedEvent

_EVENT = msgspec.json.Decoder(AnyEvent)
_COMMANDS = msgspec.json.Decoder(list[AnyCommand])
_PAGE = 2000
"""Events in one transaction."""


def read_log(connection: sqlite3.Connection, after: int = 0) -> Iterator[LoggedEvent]:
    """The events with a number above `after`, up to the last one that is on disk."""
    while True:
        page = connection.execute(
            "SELECT seq, at, event, commands FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, _PAGE)
        ).fetchall()
        for seq, at, event, commands in page:
            yield LoggedEvent(seq, at, _EVENT.decode(event), _COMMANDS.decode(commands))
        if len(page) < _PAGE:
            return
        after = page[-1][0]


def last_time(connection: sqlite3.Connection) -> Nanoseconds:
    """The time of the last event; 0 if there is none."""
    found = connection.execute("SELECT at FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    return int(found[0]) if found else 0
