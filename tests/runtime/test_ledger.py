"""Batches write the same as single writes, tokens are kept as long as needed, and a full disk loses nothing."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.apps.audit import audited
from dora_rl.apps.run_reader import read_facts
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import ConfigError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Prompt, SlotId
from dora_rl.ledger.audit import compare_tables
from dora_rl.ledger.ledger import Ledger, SchemaError, connect, read_events, read_tokens
from dora_rl.ledger.schema import SCHEMA_VERSION
from dora_rl.ledger.tables import BARRIERS, GENERATED, SCORED, Statement
from dora_rl.ledger.writer import reordered, token_chunk, token_rows
from dora_rl.runtime.run_dir import RunDir

SLOT = SlotId("i0.1", 0)


def chunk(trajectory: int, start: int, count: int, *, attempt: int = 0, sampled: bool = True) -> TokenChunk:
    return TokenChunk.of(
        trajectory, range(start, start + count), version=0, start=start, attempt=attempt, sampled=sampled
    )


def test_tokens_that_follow_each_other_become_one_row() -> None:
    chunks = [
        chunk(1, 0, 4),
        chunk(2, 0, 2),
        chunk(1, 4, 3),
        chunk(1, 7, 1, sampled=False),
        chunk(1, 8, 2),
        chunk(2, 5, 1),
    ]
    stored = sorted(map(token_chunk, token_rows(chunks)), key=lambda one: (one.trajectory, one.start))
    assert [(one.trajectory, one.start, one.end, one.sampled) for one in stored] == [
        (1, 0, 7, True),
        (1, 7, 8, False),
        (1, 8, 10, True),
        (2, 0, 2, True),
        (2, 5, 6, True),
    ]
    assert stored[0].tokens.tolist() == list(range(7))


def test_a_chunk_is_read_back_with_all_that_training_needs(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path, 1)
    prompt = Prompt(key="p", tokens=3)
    log(ledger, e.PromptsArrived(prompts=(prompt,), last=True))
    log(ledger, e.Tick(), c.StartGroup(group=0, prompt=prompt, version=2, slot=SLOT))
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    sampled = TokenChunk.of(
        0,
        [5, 6],
        [-1.0, -2.0],
        version=2,
        attempt=1,
        experts=experts,
        model_logprobs=[-3.0, -4.0],
        prompt_experts=experts,
    )
    observed = TokenChunk.of(0, [7], version=2, start=2, attempt=1, sampled=False)
    ledger.append_tokens([sampled, observed], [(0, "environment")])
    log(ledger, e.Tick())
    ledger.close()
    ledger = Ledger(path, 1)
    chunks, ended = ledger.trajectory(0)
    ledger.close()
    assert chunks == [msgspec.structs.replace(one.for_training(), attempt=0) for one in (sampled, observed)]
    assert ended == "environment"


@pytest.mark.parametrize("schema", [1, SCHEMA_VERSION - 1])
def test_a_ledger_of_an_older_version_is_refused_in_one_sentence(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "ledger.db"
    Ledger(path, 2).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema}")
    connection.close()
    for open_ledger in (lambda: connect(path), lambda: connect(path, create=True), lambda: Ledger(path, 2)):
        with pytest.raises(SchemaError, match="runs of older versions can't be resumed or audited with this one"):
            open_ledger()


def test_a_run_of_an_older_version_is_refused_before_its_settings_are(tmp_path: Path) -> None:
    """Settings that this version does not have would be refused as a mistake of the user."""
    folder = RunDir(tmp_path)
    folder.config.write_text(json.dumps({"base": str(tmp_path), "config": {"no_such_section": {}}}))
    with pytest.raises(ConfigError):
        folder.read()
    Ledger(folder.ledger, 2).close()
    with pytest.raises(ConfigError):
        folder.read()
    connection = sqlite3.connect(folder.ledger)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION - 1}")
    connection.close()
    for use in (folder.read, lambda: audited(folder), lambda: read_facts(folder)):
        with pytest.raises(SchemaError, match="older version"):
            use()


def table(changes: list[Statement]) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(":memory:")
    columns = (
        "id INTEGER PRIMARY KEY, attempt INTEGER DEFAULT 0, instance, version, fingerprint, tokens, reward, failed"
    )
    connection.execute(f"CREATE TABLE trajectories ({columns})")
    connection.executemany("INSERT INTO trajectories (id) VALUES (?)", [(0,), (1,)])
    for statement, values in changes:
        connection.execute(statement, values)
    return list(connection.execute("SELECT * FROM trajectories"))


ids, numbers = st.integers(0, 1), st.integers(0, 2)
changes = st.one_of(
    st.tuples(st.just(GENERATED), st.tuples(st.just("i0"), numbers, st.just("f"), numbers, ids, numbers)),
    st.tuples(st.just(SCORED), st.tuples(numbers, ids)),
    st.tuples(st.just(BARRIERS[0]), st.tuples(numbers, st.just("i1"), ids)),
    st.tuples(st.just(BARRIERS[1]), st.tuples(st.just("why"), ids)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(changes, max_size=12))
def test_reordered_updates_give_the_same_table(changes: list[Statement]) -> None:
    assert table(list(reordered(changes))) == table(changes)


def log(ledger: Ledger, event: e.Event, *commands: c.Command) -> None:
    ledger.log(event, list(commands), ledger.seq + 1)


def test_tokens_are_kept_until_no_checkpoint_can_need_them(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path, 2)
    prompts = tuple(Prompt(key=f"p{n}", tokens=3) for n in range(3))
    log(ledger, e.PromptsArrived(prompts=prompts, last=True))
    for group, prompt in enumerate(prompts):
        log(ledger, e.Tick(), c.StartGroup(group=group, prompt=prompt, version=0, slot=SLOT))
    for trajectory in range(6):
        ledger.append_tokens([chunk(trajectory, 0, 2), chunk(trajectory, 2, 1)], [(trajectory, "stop")])
    log(ledger, e.Tick(), c.Apply(step=0, attempt=1, groups=(0,)))
    log(ledger, e.Tick(), c.Apply(step=1, attempt=1, groups=(2,)))
    log(ledger, e.Checkpointed(version=1))
    ledger.close()
    assert kept(path) == [2, 3, 4, 5], "step 0 can't be trained again, step 1 can"
    ledger = Ledger(path, 2)
    log(ledger, e.Checkpointed(version=2))
    ledger.close()
    assert kept(path) == [2, 3], "the groups that were trained before a restart are known after it"


def kept(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    found = [trajectory for trajectory in range(6) if read_tokens(connection, trajectory)[0]]
    assert [row[0] for row in connection.execute("SELECT trajectory FROM ended ORDER BY 1")] == found
    assert list(compare_tables(connection, list(read_events(connection)), 2)) == []
    connection.close()
    return found


class Refusing:
    """A connection to a disk that is full until `full` is set to False."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.full = True

    def executemany(self, statement: str, rows: object) -> sqlite3.Cursor:
        if self.full:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._connection.executemany(statement, rows)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def __enter__(self) -> None:
        self._connection.__enter__()

    def __exit__(self, *details: object) -> None:
        self._connection.__exit__(*details)  # type: ignore[arg-type]


def test_an_event_is_durable_only_when_the_disk_has_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    made: list[Refusing] = []
    woken = threading.Event()

    def opened(path: Path) -> sqlite3.Connection:
        made.append(Refusing(connect(path)))
        return made[0]  # type: ignore[return-value]

    ledger = Ledger(path, 2, notify=woken.set, open_connection=opened)
    log(ledger, e.Tick())
    ledger.sync()
    assert woken.wait(600)
    assert "full" in ledger.write_error
    assert (ledger.seq, ledger.durable) == (1, 0)
    made[0].full = False
    while ledger.durable == 0:
        assert woken.wait(600)
    assert ledger.write_error == ""
    reader = sqlite3.connect(path)
    assert [one.seq for one in read_events(reader)] == [1]
    reader.close()
    ledger.close()
