"""`dora-rl audit` passes on real runs and names what is wrong with runs that were tampered with."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dora_rl.apps.audit import audited, conclusion
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Prompt, SlotId
from dora_rl.ledger.audit import audit
from dora_rl.ledger.auditor import Auditor, Terms
from dora_rl.ledger.ledger import read_events
from dora_rl.ledger.schema import TABLES
from dora_rl.ledger.tables import TableProjection
from dora_rl.ledger.writer import LoggedEvent, chain
from dora_rl.runtime.provenance import config_digest
from dora_rl.runtime.run_dir import RunDir
from tests.fuzz import valid_ledger
from tests.runtime.host import Host
from tests.runtime.making import make_run, settings

MODES = ["sync", "one_step_off", "partial", "dora"]


@pytest.fixture(scope="module")
def finished(host: Host, base: Path) -> dict[str, RunDir]:
    """One run of each mode."""
    folders = {mode: make_run(base, f"audit-{mode}", settings(base, mode, steps=3)) for mode in MODES}
    for mode, started in [(mode, host.start(folder)) for mode, folder in folders.items()]:
        assert started.wait().get("code") == 0, mode
    return folders


@pytest.mark.parametrize("mode", MODES)
def test_real_runs_pass(finished: dict[str, RunDir], mode: str) -> None:
    found = audited(finished[mode])
    assert found.problems == []
    assert found.finished
    assert found.steps == 3
    assert conclusion(found).startswith("kept")


@pytest.fixture
def doctored(finished: dict[str, RunDir], tmp_path: Path) -> RunDir:
    """A copy of a run that a test may tamper with."""
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    for suffix in ("", "-wal", "-shm"):
        source = finished["dora"].path / f"ledger.db{suffix}"
        if source.exists():
            shutil.copy(source, folder.path)
    shutil.copy(finished["dora"].config, folder.path)
    shutil.copytree(finished["dora"].checkpoints, folder.checkpoints)
    assert audited(folder).problems == []
    return folder


def change(folder: RunDir, *statements: str) -> None:
    """Tamper with a ledger."""
    connection = sqlite3.connect(folder.ledger)
    for statement in statements:
        assert connection.execute(statement).rowcount, statement
    connection.commit()
    connection.close()


# One row of each table, as a condition, and an assignment that changes it.
ROWS = {
    "events": ("seq = 9", "at = at + 1"),
    "prompts": ("number = 1", "tokens = tokens + 1"),
    "groups": ("id = 1", "version = version + 1"),
    "trajectories": ("id = 3", "reward = 0.75"),
    "tokens": ("(trajectory, start) = (SELECT trajectory, max(start) FROM tokens)", "logprobs = zeroblob(4)"),
    "ended": ("trajectory = (SELECT max(trajectory) FROM ended)", "reason = 'environment'"),
    "steps": ("step = 1", "fingerprint = 'other'"),
    "records": ("number = 1", "record = CAST(replace(CAST(record AS TEXT), '0.001', '0.002') AS BLOB)"),
}
NAMED = {
    "events": "event",
    "tokens": "trajectory",
    "ended": "trajectory",
    "records": "record 1 was changed",
}


def problems(folder: RunDir, table: str) -> list[str]:
    """Problems that the audit finds with a table."""
    word = NAMED.get(table, f"table {table}")
    return [problem for problem in audited(folder).problems if word in problem]


@pytest.mark.parametrize("table", ROWS)
def test_changed_row_is_named(doctored: RunDir, table: str) -> None:
    where, how = ROWS[table]
    change(doctored, f"UPDATE {table} SET {how} WHERE {where}")
    assert problems(doctored, table)


@pytest.mark.parametrize("table", ROWS)
def test_removed_row_is_named(doctored: RunDir, table: str) -> None:
    change(doctored, f"DELETE FROM {table} WHERE {ROWS[table][0]}")
    assert problems(doctored, table)


# A copy of the row under a free key.
COPIES = {
    "events": "SELECT (SELECT max(seq) + 1 FROM events), at, event, commands, chain",
    "prompts": "SELECT 'copy', 999, tokens",
    "groups": "SELECT 999, (SELECT max(key) FROM prompts WHERE key NOT IN (SELECT prompt FROM groups)), version, "
    "admitted_at, step, failure, no_signal",
    "trajectories": 'SELECT 999, "group", attempt, instance, version, fingerprint, tokens, reward, failed',
    "tokens": "SELECT trajectory, start + 999, version, tokens, logprobs, sampled, experts, expert_layers, "
    "experts_per_token, digest",
    "ended": "SELECT 999, reason, digest",
    "steps": "SELECT 999, applied_at, published_at, fingerprint",
    "records": "SELECT (SELECT max(number) + 1 FROM records), at, record, chain",
}


@pytest.mark.parametrize("table", ROWS)
def test_doubled_row_is_named(doctored: RunDir, table: str) -> None:
    change(doctored, f"INSERT INTO {table} {COPIES[table]} FROM {table} WHERE {ROWS[table][0]}")
    assert (
        any("record" in one for one in audited(doctored).problems) if table == "records" else problems(doctored, table)
    )


# Two rows are swapped.
SWAPS = {
    "events": "UPDATE events SET seq = CASE seq WHEN 9 THEN -10 ELSE -9 END WHERE seq IN (9, 10)",
    "prompts": "UPDATE prompts SET number = CASE number WHEN 1 THEN -2 ELSE -1 END WHERE number IN (1, 2)",
    "groups": "UPDATE groups SET id = CASE id WHEN 1 THEN -2 ELSE -1 END WHERE id IN (1, 2)",
    "trajectories": "UPDATE trajectories SET id = CASE id WHEN 1 THEN -2 ELSE -1 END WHERE id IN (1, 2)",
    "steps": "UPDATE steps SET step = CASE step WHEN 0 THEN -1 ELSE -2 END WHERE step IN (0, 1)",
}


@pytest.mark.parametrize("table", SWAPS)
def test_swapped_rows_are_named(doctored: RunDir, table: str) -> None:
    column = {"events": "seq", "prompts": "number", "steps": "step"}.get(table, "id")
    # Steps count from 0, so their negatives are shifted by one.
    back = f"-1 - {column}" if table == "steps" else f"-{column}"
    change(doctored, SWAPS[table], f"UPDATE {table} SET {column} = {back} WHERE {column} < 0")
    if table == "steps":
        change(doctored, "UPDATE steps SET fingerprint = 'x' || fingerprint WHERE step = 0")
    assert problems(doctored, table)


def test_swapped_tokens_are_named(doctored: RunDir) -> None:
    change(
        doctored,
        "UPDATE tokens SET logprobs = (SELECT logprobs FROM tokens WHERE start = 0 ORDER BY trajectory LIMIT 1) "
        "WHERE (trajectory, start) = (SELECT max(trajectory), 0 FROM tokens)",
    )
    assert problems(doctored, "tokens")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE moves SET arrived = 0",
        "DELETE FROM moves",
        "INSERT INTO moves SELECT * FROM moves",
        "UPDATE moves SET source = target, target = source",
    ],
)
def test_doctored_moves_are_named(tmp_path: Path, statement: str) -> None:
    """Uses a log with a move: whether a small run moves requests is a matter of chance."""
    path = tmp_path / "ledger.db"
    path.write_bytes(valid_ledger(tmp_path))
    terms = Terms(1, 2, 1, False, None)

    def named() -> bool:
        return any("table moves" in problem for problem in audit(path, terms).problems)

    assert not named()
    change(RunDir(tmp_path), statement)
    assert named()


def test_truncated_log_is_named(doctored: RunDir) -> None:
    change(doctored, "DELETE FROM events WHERE seq > (SELECT max(seq) / 2 FROM events)")
    assert any("table" in problem for problem in audited(doctored).problems)


def test_damaged_file_is_named(doctored: RunDir) -> None:
    connection = sqlite3.connect(doctored.ledger)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(doctored.ledger.read_bytes())
    data[4096 * 3 : 4096 * 3 + 512] = bytes(512)
    doctored.ledger.write_bytes(data)
    assert any("damaged" in problem for problem in audited(doctored).problems)


Edit = Callable[[bytes, bytes], tuple[bytes, bytes]]


def forge(folder: RunDir, edit: Edit) -> None:
    """Rewrite the log with a valid chain, and the tables from it: only the content can be wrong."""
    connection = sqlite3.connect(folder.ledger)
    link = b""
    for seq, at, event, commands in connection.execute("SELECT seq, at, event, commands FROM events").fetchall():
        new_event, new_commands = edit(event, commands)
        link = chain(link, seq, at, new_event, new_commands)
        row = (new_event, new_commands, link, seq)
        connection.execute("UPDATE events SET event = ?, commands = ?, chain = ? WHERE seq = ?", row)
    ours = sqlite3.connect(":memory:")
    ours.executescript(TABLES)
    tables = TableProjection(2)
    for entry in list(read_events(connection)):
        tables.apply(entry.event, entry.commands, entry.at)
        for statement, values in tables.take():
            ours.execute(statement, values)
    for table in ("moves", "steps", "trajectories", "groups", "prompts"):
        connection.execute(f"DELETE FROM {table}")
        rows = ours.execute(f"SELECT * FROM {table}").fetchall()
        for row in rows:
            connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    connection.commit()
    connection.close()


def once(pattern: bytes, change: Callable[[re.Match[bytes]], bytes], *, commands: bool = False) -> Edit:
    """Change the first match."""
    done = False

    def edit(event: bytes, answer: bytes) -> tuple[bytes, bytes]:
        nonlocal done
        texts = [event, answer]
        found = None if done else re.search(pattern, texts[commands])
        if found is not None:
            done = True
            texts[commands] = texts[commands][: found.start()] + change(found) + texts[commands][found.end() :]
        return texts[0], texts[1]

    return edit


FORGERIES: dict[str, tuple[Edit, str]] = {
    "fingerprint served": (
        once(rb'("Generated".*"fingerprint":")(\w{4})', lambda found: found[1] + b"0bad"),
        "not the published version",
    ),
    "fingerprint loaded": (
        once(rb'("SlotLoaded".*"fingerprint":")(\w{4})', lambda found: found[1] + b"0bad"),
        "not the published version",
    ),
    "difference of a probe": (
        once(rb'("SlotLoaded".*"difference":)[^,]+', lambda found: found[1] + b"0.7"),
        "differs from the trainer by 0.7",
    ),
    "a load without its probe": (
        once(rb'("SlotLoaded".*"probe":)\{[^}]*\}', lambda found: found[1] + b"null"),
        "was not probed",
    ),
    "another probe": (
        once(rb'("SlotLoaded".*"digest":")(\w{4})', lambda found: found[1] + b"0bad"),
        "another probe than was published",
    ),
    "version served": (
        once(rb'("Generated".*"version":)(\d)', lambda found: found[1] + b"%d" % (int(found[2]) + 1)),
        "was served",
    ),
    "a step with too few groups": (
        once(rb'("Apply".*?"groups":)\[\d+,', lambda found: found[1] + b"[", commands=True),
        "groups and is not the last",
    ),
    "a group trained early": (
        once(rb'("Apply".*?"groups":)\[\d+,', lambda found: found[1] + b"[5,", commands=True),
        "trains group 5",
    ),
    "a prompt admitted twice": (
        once(rb'("StartGroup","group":1,"prompt":\{"key":")[^"]+', lambda found: found[1] + b"no such", commands=True),
        "never offered",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_log_that_contradicts_the_promises_is_named(doctored: RunDir, name: str) -> None:
    edit, expected = FORGERIES[name]
    try:
        forge(doctored, edit)
    except sqlite3.IntegrityError:
        forge_log_only(doctored, edit)
    found = audited(doctored).problems
    assert any(expected in problem for problem in found), found


def forge_log_only(folder: RunDir, edit: Edit) -> None:
    """Rewrite only the log: the tables can't hold what it says."""
    connection = sqlite3.connect(folder.ledger)
    link = b""
    for seq, at, event, commands in connection.execute("SELECT seq, at, event, commands FROM events").fetchall():
        new_event, new_commands = edit(event, commands)
        link = chain(link, seq, at, new_event, new_commands)
        connection.execute(
            "UPDATE events SET event = ?, commands = ?, chain = ? WHERE seq = ?", (new_event, new_commands, link, seq)
        )
    connection.commit()
    connection.close()


def test_decisions_of_another_configuration_are_named(doctored: RunDir) -> None:
    """The ledger itself has the other configuration, with a valid chain and digest."""
    connection = sqlite3.connect(doctored.ledger)
    link = b""
    for number, at, body in connection.execute("SELECT number, at, record FROM records").fetchall():
        record = msgspec.json.decode(body)
        if record["type"] == "Configured":
            record["config"]["control"]["max_staleness"] = 0
            record["digest"] = config_digest(record["base"], record["config"])
        forged = msgspec.json.encode(record)
        link = chain(link, number, at, forged, b"")
        connection.execute("UPDATE records SET record = ?, chain = ? WHERE number = ?", (forged, link, number))
    connection.commit()
    connection.close()
    found = audited(doctored).problems
    assert any("gave other commands" in problem for problem in found), found
    assert any("'control.max_staleness' is 3 and was 0" in problem for problem in found), found


# -- the bound ----------------------------------------------------------------------------------------------------


def bound_problems(version: int, step: int, staleness: int, raised: int | None = None) -> list[str]:
    """What the auditor reports for one group of a version that is trained in a step."""
    prompt, slot = Prompt(key="p", tokens=1), SlotId("i0.1", 0)
    served = e.Generated(
        trajectory=0, attempt=0, instance="i0.1", version=version, fingerprint="f", tokens=1, kv_tokens=0
    )
    changed: list[tuple[e.Event, list[c.Command]]]
    changed = [] if raised is None else [(e.BoundChanged(max_staleness=raised), [])]
    log: list[tuple[e.Event, list[c.Command]]] = [
        (e.PromptsArrived(prompts=(prompt,)), [c.Publish(version=version, attempt=1)]),
        (
            e.Published(version=version, attempt=1, fingerprint="f"),
            [c.StartGroup(group=0, prompt=prompt, version=version, slot=slot)],
        ),
        *changed,
        (served, []),
        (e.Scored(trajectory=0, reward=1.0), [c.Apply(step=step, attempt=1, groups=(0,))]),
    ]
    auditor = Auditor(Terms(1, 1, staleness, False, None))
    for seq, (event, commands) in enumerate(log, 1):
        auditor.observe(LoggedEvent(seq, seq, event, commands))
    return [problem for problem in auditor.problems if "the bound is" in problem]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_bound_is_neither_wider_nor_narrower_by_one(staleness: int) -> None:
    for version in (0, 3):
        for age in range(staleness + 1):
            assert bound_problems(version, version + age, staleness) == []
        assert bound_problems(version, version + staleness + 1, staleness)
    assert bound_problems(3, 2, staleness), "a step can't train a version that does not exist yet"


def test_a_group_is_held_to_the_bound_under_which_it_was_admitted() -> None:
    assert bound_problems(0, 3, 2, raised=5)
    assert bound_problems(0, 2, 2, raised=0) == []
