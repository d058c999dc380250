"""Whether a run has kept its promises, from its ledger alone.

It reads what was logged and believes none of it: what became of each group is worked out anew from the events and
commands, and the tables are derived from the log a second time. It changes nothing and needs no orchestrator.

What it can't notice: somebody who rewrites the log, its chain and all tables so that they agree. The chain is a
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
from dora_rl.ledger.ledger import LedgerError, Logged, check_pages, connect, read_events, read_notes, read_tokens, spent
from dora_rl.ledger.notes import Noted
from dora_rl.ledger.schema import TABLES
from dora_rl.ledger.tables import derive

_DERIVED = {"prompts": 1, "groups": 1, "trajectories": 1, "moves": 5, "steps": 1}
"""Tables that follow from the log, and how many of their first columns name a row."""
_MOST = 5
"""Rows named one by one; the others are counted."""


class Named(NamedTuple):
    """One figure for people."""

    name: str
    value: str


@dataclass(slots=True)
class Audit:
    """What was found."""

    problems: list[str] = field(default_factory=list)
    figures: list[Named] = field(default_factory=list)
    finished: bool = False
    """Nothing is left to do in the run."""
    steps: int = 0
    log: list[Logged] = field(default_factory=list)
    """As far as it is sound."""
    notes: list[Noted] = field(default_factory=list)
    """As far as they are sound."""


def audit(path: Path, terms: Terms) -> Audit:
    """Look at a ledger, of a run that is over, was interrupted or goes on."""
    found = Audit()
    try:
        connection = connect(path)
        check_pages(connection, path)
    except LedgerError as error:
        found.problems.append(str(error))
        return found
    witness = Auditor(terms)
    try:
        connection.execute("BEGIN")  # one moment, should the run go on meanwhile
        _read_log(connection, witness, found)
        _read_notes(connection, found)
        found.problems += witness.problems
        found.problems += witness.at_the_end()
        found.problems += compare_tables(connection, found.log, terms.group_size)
        found.problems += _check_tokens(connection, witness)
        share = spent(connection) / max(1e-9, witness.at / SECOND)
    except (sqlite3.DatabaseError, ValueError) as error:
        found.problems.append(f"{path} is damaged: {error}")
        return found
    finally:
        connection.close()
    found.finished, found.steps = witness.finished, witness.steps
    found.figures = [*_figures(witness), Named("ledger, share of the run's time", f"{share:.2%}")]
    return found


def _read_log(connection: sqlite3.Connection, witness: Auditor, found: Audit) -> None:
    try:
        for logged in read_events(connection):
            found.log.append(logged)
            witness.observe(logged)
    except IntegrityError as error:
        found.problems.append(str(error))


def _read_notes(connection: sqlite3.Connection, found: Audit) -> None:
    try:
        for noted in read_notes(connection):
            found.notes.append(noted)
    except IntegrityError as error:
        found.problems.append(str(error))


def compare_tables(connection: sqlite3.Connection, log: Iterable[Logged], group_size: int) -> Iterator[str]:
    """Where a table is not what the log says."""
    ours = sqlite3.connect(":memory:")
    ours.executescript(TABLES)
    try:
        for logged in log:
            for statement, values in derive(logged.event, list(logged.commands), logged.at, group_size):
                ours.execute(statement, values)
    except sqlite3.DatabaseError as error:
        yield f"event {logged.seq} contradicts those before it: {error}"
    for table, keys in _DERIVED.items():
        query = f'SELECT * FROM "{table}"'  # noqa: S608
        yield from _compared(table, keys, list(ours.execute(query)), list(connection.execute(query)))
    ours.close()


def _compared(table: str, keys: int, expected: list[Any], there: list[Any]) -> list[str]:
    missing, extra = Counter(expected), Counter(there)
    missing, extra = missing - extra, extra - missing
    changed = {row[:keys] for row in missing} & {row[:keys] for row in extra}
    found = [f"table {table}: row {_name(key)} was changed" for key in sorted(changed)]
    found += [f"table {table}: row {_name(row[:keys])} is missing" for row in missing if row[:keys] not in changed]
    found += [
        f"table {table}: row {_name(row[:keys])} is not in the log, or there twice"
        for row in extra
        if row[:keys] not in changed
    ]
    rest = len(found) - _MOST
    return found if rest <= 0 else [*found[:_MOST], f"table {table}: {rest} more rows differ"]


def _check_tokens(connection: sqlite3.Connection, witness: Auditor) -> Iterator[str]:
    """Where the tokens of a trajectory are incomplete, of another version, or should have been deleted."""
    query = "SELECT trajectory FROM tokens UNION SELECT trajectory FROM ended"
    there = {row[0] for row in connection.execute(query)}
    for trajectory in sorted(there | witness.kept()):
        fate = witness.fate(trajectory)
        if fate is None:
            yield f"trajectory {trajectory} has tokens, but the log does not have the trajectory"
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
            if chunk.version != fate.version and not witness.terms.mixes:
                yield f"trajectory {trajectory} of version {fate.version} has tokens of version {chunk.version}"
        if fate.tokens is not None and (length != fate.tokens or ended is None):
            yield f"trajectory {trajectory} ended with {fate.tokens} tokens, and {length} of them are there"
        if fate.over and (length or ended is not None):
            yield f"the tokens of trajectory {trajectory} should have been deleted, and are still there"


def _figures(witness: Auditor) -> Iterator[Named]:
    groups = Counter(witness.outcome(group) for group in range(len(witness.groups)))
    ages = Counter(step - witness.groups[group].version for group, step in witness.trained.items())
    yield Named("events", f"{witness.events:,}")
    yield Named("prompts handed out", f"{len(witness.offered):,}")
    yield Named("groups admitted", f"{len(witness.groups):,}")
    for name in ("trained", "with a verdict", "live"):
        yield Named(f"  {name}", f"{groups[name]:,}")
    yield Named("steps", f"{witness.steps:,}")
    yield Named("staleness", ", ".join(f"{age}: {count:,}" for age, count in sorted(ages.items())) or "none")
    yield Named("trajectories of one version", f"{witness.pure:,}")
    yield Named("  of mixed versions", f"{witness.mixed:,}")
    yield Named("  failed, with a reason", f"{witness.failed:,}")
    yield Named("weights loaded into slots", f"{witness.loads:,}")
    widest = f", differing by at most {witness.widest:.2g}" if witness.probed else ""
    yield Named("  compared with the trainer's probe", f"{witness.probed:,}{widest}")
    yield Named("  refused, since they differed", f"{witness.differing:,}")
    yield Named("requests moved", f"{witness.arrived:,} of {witness.moved:,}")
    yield Named("requests begun again from their tokens", f"{witness.resumed:,}")
    yield Named("  tokens prefilled for that", f"{witness.prefilled:,}")
    yield Named("instances lost", f"{witness.instances_lost:,}")
    yield Named("trainers lost", f"{witness.trainers_lost:,}")


def _name(key: tuple[Any, ...]) -> str:
    return " ".join(str(part) for part in key)
