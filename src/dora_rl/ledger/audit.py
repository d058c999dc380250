"""Checks from its ledger alone whether a run has kept its promises.

The audit trusts nothing in the ledger: the auditor works out the outcome of each group from the events and commands,
and the tables are derived from the log a second time and compared. It changes nothing and needs no orchestrator.

It can't detect that someone has rewritten the log, its chain and all tables so that they agree: the chain is a
checksum, not a signature.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dora_rl.core.errors import IntegrityError
from dora_rl.core.types import SECOND
from dora_rl.ledger.auditor import Auditor, Terms
from dora_rl.ledger.ledger import (
    LedgerError,
    check_pages,
    connect,
    cpu_seconds,
    read_events,
    read_records,
    read_tokens,
)
from dora_rl.ledger.run_records import RecordedAt
from dora_rl.ledger.schema import TABLES
from dora_rl.ledger.tables import TableProjection
from dora_rl.ledger.writer import LoggedEvent

_DERIVED = {"prompts": 1, "groups": 1, "trajectories": 1, "moves": 5, "steps": 1}
"""Tables that are derived from the log, and how many of their first columns identify a row."""
_MAX_NAMED = 5
"""Rows that are named one by one; the others are counted."""


class Named(NamedTuple):
    """One figure for people."""

    name: str
    value: str


@dataclass(slots=True)
class Audit:
    """Result of an audit."""

    problems: list[str] = field(default_factory=list)
    figures: list[Named] = field(default_factory=list)
    finished: bool = False
    """The run has nothing left to do."""
    steps: int = 0
    log: list[LoggedEvent] = field(default_factory=list)
    """The event log up to the first entry that is damaged."""
    records: list[RecordedAt] = field(default_factory=list)
    """The run records up to the first one that is damaged."""


def audit(path: Path, terms: Terms) -> Audit:
    """Check the ledger of a run that is finished, interrupted or still going on."""
    found = Audit()
    try:
        connection = connect(path)
        check_pages(connection, path)
    except LedgerError as error:
        found.problems.append(str(error))
        return found
    auditor = Auditor(terms)
    try:
        connection.execute("BEGIN")  # one snapshot: the run may be going on
        _read_log(connection, auditor, found)
        _read_records(connection, found)
        found.problems += auditor.problems
        found.problems += auditor.final_problems()
        found.problems += compare_tables(connection, found.log, terms.group_size)
        found.problems += _check_tokens(connection, auditor)
        share = cpu_seconds(connection) / max(1e-9, auditor.at / SECOND)
    except (sqlite3.DatabaseError, ValueError) as error:
        found.problems.append(f"{path} is damaged: {error}")
        return found
    finally:
        connection.close()
    found.finished, found.steps = auditor.finished, auditor.steps
    found.figures = [*_figures(auditor), Named("ledger, share of the run's time", f"{share:.2%}")]
    return found


def _read_log(connection: sqlite3.Connection, auditor: Auditor, found: Audit) -> None:
    try:
        for entry in read_events(connection):
            found.log.append(entry)
            auditor.observe(entry)
    except IntegrityError as error:
        found.problems.append(str(error))


def _read_records(connection: sqlite3.Connection, found: Audit) -> None:
    try:
        found.records += read_records(connection)
    except IntegrityError as error:
        found.problems.append(str(error))


def compare_tables(connection: sqlite3.Connection, log: Iterable[LoggedEvent], group_size: int) -> Iterator[str]:
    """Where a table differs from what the log gives."""
    derived = sqlite3.connect(":memory:")
    derived.executescript(TABLES)
    tables = TableProjection(group_size)
    try:
        for entry in log:
            tables.apply(entry.event, entry.commands, entry.at)
            for statement, values in tables.take():
                derived.execute(statement, values)
    except sqlite3.DatabaseError as error:
        yield f"event {entry.seq} contradicts the events before it: {error}"
    for table, keys in _DERIVED.items():
        query = f'SELECT * FROM "{table}"'  # noqa: S608
        yield from _row_differences(table, keys, list(derived.execute(query)), list(connection.execute(query)))
    derived.close()


def _row_differences(table: str, keys: int, expected: list[Any], actual: list[Any]) -> list[str]:
    missing, extra = Counter(expected), Counter(actual)
    missing, extra = missing - extra, extra - missing
    changed = {row[:keys] for row in missing} & {row[:keys] for row in extra}
    found = [f"table {table}: row {_name(key)} was changed" for key in sorted(changed)]
    found += [f"table {table}: row {_name(row[:keys])} is missing" for row in missing if row[:keys] not in changed]
    found += [
        f"table {table}: row {_name(row[:keys])} is not in the log, or is in the table twice"
        for row in extra
        if row[:keys] not in changed
    ]
    rest = len(found) - _MAX_NAMED
    return found if rest <= 0 else [*found[:_MAX_NAMED], f"table {table}: {rest} more rows differ"]


def _check_tokens(connection: sqlite3.Connection, auditor: Auditor) -> Iterator[str]:
    """Where the tokens of a trajectory are incomplete, of another version, or should have been deleted."""
    query = "SELECT trajectory FROM tokens UNION SELECT trajectory FROM ended"
    stored = {row[0] for row in connection.execute(query)}
    for trajectory in sorted(stored | auditor.complete()):
        expected = auditor.expected_tokens(trajectory)
        if expected is None:
            yield f"the ledger has tokens of trajectory {trajectory}, which the log does not start"
            continue
        try:
            chunks, ended = read_tokens(connection, trajectory)
        except IntegrityError as error:
            yield str(error)
            continue
        length = 0
        for chunk in chunks:
            if chunk.start != length:
                yield f"trajectory {trajectory} has {length} tokens, and the next ones begin at {chunk.start}"
            length = chunk.end
            if chunk.version != expected.version and not auditor.terms.mixes_versions:
                yield f"trajectory {trajectory} of version {expected.version} has tokens of version {chunk.version}"
        if expected.length is not None and (length != expected.length or ended is None):
            yield f"trajectory {trajectory} ended with {expected.length} tokens, and the ledger has {length} of them"
        if expected.deleted and (length or ended is not None):
            yield f"the tokens of trajectory {trajectory} should have been deleted and are still in the ledger"


def _figures(auditor: Auditor) -> Iterator[Named]:
    groups = Counter(auditor.outcome(group) for group in range(len(auditor.groups)))
    staleness = Counter(step - auditor.groups[group].version for group, step in auditor.trained.items())
    yield Named("events", f"{auditor.events:,}")
    yield Named("prompts offered", f"{len(auditor.offered):,}")
    yield Named("groups admitted", f"{len(auditor.groups):,}")
    yield Named("  trained", f"{groups['trained']:,}")
    yield Named("  failed", f"{groups['failed']:,}")
    yield Named("  without signal", f"{groups['without signal']:,}")
    yield Named("  live", f"{groups['live']:,}")
    yield Named("steps", f"{auditor.steps:,}")
    yield Named("staleness", ", ".join(f"{age}: {count:,}" for age, count in sorted(staleness.items())) or "none")
    yield Named("trajectories of one version", f"{auditor.pure:,}")
    yield Named("  of mixed versions", f"{auditor.mixed:,}")
    yield Named("  failed, with a reason", f"{auditor.failed:,}")
    yield Named("weights loaded into slots", f"{auditor.loads:,}")
    widest = f", differing by at most {auditor.widest:.2g}" if auditor.probed else ""
    yield Named("  compared with the trainer's probe", f"{auditor.probed:,}{widest}")
    yield Named("  refused because they differed", f"{auditor.differing:,}")
    yield Named("requests moved", f"{auditor.arrived:,} of {auditor.moved:,}")
    yield Named("requests resumed from their tokens", f"{auditor.resumed:,}")
    yield Named("  tokens prefilled for that", f"{auditor.prefilled:,}")
    yield Named("instances lost", f"{auditor.instances_lost:,}")
    yield Named("trainers lost", f"{auditor.trainers_lost:,}")


def _name(key: tuple[Any, ...]) -> str:
    return " ".join(str(value) for value in key)
