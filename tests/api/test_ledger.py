"""`dora_rl.Ledger` reads what a run has recorded, while it runs and afterwards, and never writes."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dora_rl import IntegrityError, Ledger, Orchestrator, Run, UserError, train
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Prompt, SlotId
from dora_rl.ledger.ledger import Ledger as Writer
from dora_rl.ledger.reader import LedgerReader, connect_read_only
from dora_rl.ledger.run_records import Configured, utc
from tests.api.conftest import small
from tests.api.rewards import odd_digits

ROWS = [{"prompt": f"{number}*2=", "number": number} for number in range(1, 40)]


def contents(folder: Path) -> dict[str, str]:
    """All files of a ledger with their digests, but SQLite's index of its log, which has its locks."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.glob("ledger.db*")
        if not file.name.endswith("-shm")
    }


class Follower:
    """Reads the ledger of a run at each of its steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[int] = []
        self.trained: list[int] = []

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        ledger = Ledger(self.path)
        assert ledger.verify() == []
        count = ledger.conservation()
        assert count.holds
        self.steps.append(len(list(ledger.steps())))
        self.trained.append(count.trained)


@pytest.fixture(scope="module")
def followed(job: Path) -> tuple[Run, Follower]:
    follower = Follower(job / "runs" / "ledger")
    config = small(job, steps=4, dynamic_sampling=1)
    run = train(job / "model", odd_digits, ROWS, config=config, callbacks=[follower], name="ledger", quiet=True)
    return run, follower


def test_a_run_is_read_while_it_is_going_on(followed: tuple[Run, Follower]) -> None:
    """What is durable may be behind what has happened, never ahead; it grows, and always adds up."""
    run, follower = followed
    assert run.state == "finished"
    assert len(follower.steps) == 4
    for number, (steps, trained) in enumerate(zip(follower.steps, follower.trained, strict=True), start=1):
        assert trained <= 2 * number
        assert steps <= number + 1
        assert trained <= 2 * steps
    assert follower.trained[-1] > 0


def test_rows_agree_with_the_metrics_and_with_each_other(followed: tuple[Run, Follower]) -> None:
    run, _ = followed
    ledger = run.ledger
    groups = list(ledger.groups())
    steps = list(ledger.steps())
    trajectories = list(ledger.trajectories())
    count = ledger.conservation()
    assert (count.trained, count.holds) == (8, True)
    by_outcome = Counter(group.outcome for group in groups)
    assert (count.admitted, count.failed, count.without_signal, count.live) == (
        len(groups),
        by_outcome["failed"],
        by_outcome["without signal"],
        by_outcome["live"],
    )
    assert [step.step for step in steps] == [0, 1, 2, 3]
    staleness = Counter(group.staleness for group in groups if group.outcome == "trained")
    assert staleness == run.summary().staleness
    for step, metrics in zip(steps, run.metrics, strict=True):
        assert step.published_at is not None
        assert step.fingerprint
        own = list(ledger.groups(step=step.step))
        assert step.groups == tuple(group.id for group in own)
        rewards = [one.reward for group in own for one in ledger.trajectories(group=group.id)]
        assert len(rewards) == 4
        assert sum(reward or 0.0 for reward in rewards) / 4 == pytest.approx(metrics["reward/mean"])
    assert [one.group for one in trajectories] == [number // 2 for number in range(len(trajectories))]
    trained = {group.id: group.version for group in groups if group.outcome == "trained"}
    assert all(one.version == trained[one.group] for one in trajectories if one.group in trained)


def test_a_replay_of_the_log_gives_the_same_commands_and_counts(followed: tuple[Run, Follower]) -> None:
    ledger = followed[0].ledger
    orchestrator = Orchestrator(**ledger.settings["control"])
    for entry in ledger.events():
        assert orchestrator.step(entry.event, entry.at) == entry.commands
    state, count = orchestrator.snapshot(), ledger.conservation()
    assert (state.admitted, state.trained, state.failed, state.without_signal) == (
        count.admitted,
        count.trained,
        count.failed,
        count.without_signal,
    )
    other = Orchestrator(**{**ledger.settings["control"], "max_staleness": 0})
    assert any(other.step(entry.event, entry.at) != entry.commands for entry in ledger.events())


def read_all(ledger: LedgerReader) -> None:
    for rows in (ledger.groups(), ledger.trajectories(), ledger.steps(), ledger.events()):
        assert list(rows)
    ledger.tokens(0)
    ledger.conservation()
    assert ledger.verify() == []


def test_reading_changes_no_file_and_creates_none(followed: tuple[Run, Follower]) -> None:
    run, _ = followed
    before = contents(run.path)
    listed = sorted(run.path.iterdir())
    read_all(run.ledger)
    next(run.ledger.groups())  # an iterator that is left alone
    assert contents(run.path) == before
    assert sorted(run.path.iterdir()) == listed
    connection = connect_read_only(run.path / "ledger.db")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM groups")
    connection.close()


@pytest.fixture
def open_ledger(tmp_path: Path) -> Any:
    """A ledger that a writer has open, as while a run is going on: one group of two, with tokens."""
    writer = Writer(tmp_path / "ledger.db", 2)
    prompt = Prompt(key="p", tokens=3)
    writer.record(Configured(utc=utc(), base="/", config={"control": {"group_size": 2}}, digest=""), 0)
    started = c.StartGroup(group=0, prompt=prompt, version=0, slot=SlotId("i0.1", 0))
    writer.log(e.PromptsArrived(prompts=(prompt,)), [], 1)
    writer.log(e.Tick(), [started], 2)
    writer.append_tokens([TokenChunk.of(1, [5, 6], [-1.0, -2.0], version=0)], [(1, "stop")])
    flush(writer)
    yield writer
    writer.close()


def flush(writer: Writer) -> None:
    last = writer.log(e.Tick(), [], 5)
    done = writer._thread
    while writer.durable < last:
        writer.sync()
        done.join(0.01)


def test_a_reader_of_an_open_ledger_sees_a_snapshot_and_writes_nothing(open_ledger: Writer, tmp_path: Path) -> None:
    assert (tmp_path / "ledger.db-wal").exists()
    before = contents(tmp_path)
    ledger = Ledger(tmp_path / "ledger.db")
    chunks = ledger.tokens(1)
    assert [(chunk.tokens.tolist(), chunk.logprobs.tolist()) for chunk in chunks] == [([5, 6], [-1.0, -2.0])]
    assert [group.outcome for group in ledger.groups()] == ["live"]
    assert ledger.verify() == []
    assert contents(tmp_path) == before
    with ledger._reading() as connection:
        (counted,) = connection.execute("SELECT count(*) FROM events").fetchone()
        open_ledger.log(e.Tick(), [], 4)
        flush(open_ledger)
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (counted,)
    before = contents(tmp_path)
    reading = ledger.events()
    first = next(reading)
    assert contents(tmp_path) == before
    open_ledger.log(e.Tick(), [], 5)
    flush(open_ledger)
    assert [first.seq, *(entry.seq for entry in reading)] == [1, 2, 3, 4, 5]  # as it was
    assert len(list(ledger.events())) == 7
    connection = connect_read_only(tmp_path / "ledger.db")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM groups")
    connection.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE groups SET failure = 'x' WHERE id = 0", "table groups: row 0 was changed"),
        ("UPDATE trajectories SET reward = reward + 1 WHERE id = 3", "table trajectories: row 3 was changed"),
        ("DELETE FROM steps WHERE step = 1", "table steps: row 1 is missing"),
        ("UPDATE events SET at = at + 1 WHERE seq = 7", "event 7 was changed or removed"),
        ("DELETE FROM events WHERE seq = 9", "event 9 was changed or removed"),
        ("UPDATE records SET at = at + 1 WHERE number = 2", "record 2 was changed or removed"),
        ("UPDATE records SET at = at + 1 WHERE number = 1", "record 1 was changed or removed"),
    ],
)
def test_verify_names_what_was_changed(
    followed: tuple[Run, Follower], tmp_path: Path, statement: str, problem: str
) -> None:
    changed(followed[0], tmp_path, statement)
    assert any(problem in one for one in Ledger(tmp_path / "ledger.db").verify())


def changed(run: Run, folder: Path, statement: str) -> None:
    """A copy of a ledger in which someone has changed something."""
    shutil.copy(run.path / "ledger.db", folder)
    connection = sqlite3.connect(folder / "ledger.db")
    assert connection.execute(statement).rowcount == 1
    connection.commit()
    connection.close()


def test_a_group_with_two_outcomes_breaks_the_conservation(followed: tuple[Run, Follower], tmp_path: Path) -> None:
    (first, *_) = (group.id for group in followed[0].ledger.groups() if group.outcome == "trained")
    changed(followed[0], tmp_path, f"UPDATE groups SET failure = 'x' WHERE id = {first}")
    count = Ledger(tmp_path / "ledger.db").conservation()
    assert not count.holds
    assert count.trained + count.failed + count.without_signal + count.live == count.admitted + 1


def test_damaged_events_and_tokens_are_never_returned(
    followed: tuple[Run, Follower], open_ledger: Writer, tmp_path: Path
) -> None:
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.execute("UPDATE tokens SET logprobs = zeroblob(8)")
    connection.commit()
    connection.close()
    ledger = Ledger(tmp_path / "ledger.db")
    with pytest.raises(IntegrityError, match="the tokens of trajectory 1 at 0 are not what was written"):
        ledger.tokens(1)
    assert any("the tokens of trajectory 1" in one for one in ledger.verify())
    other = tmp_path / "other"
    other.mkdir()
    changed(followed[0], other, "UPDATE events SET at = at + 1 WHERE seq = 5")
    reading = Ledger(other / "ledger.db").events()
    assert [next(reading).seq for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(IntegrityError, match="event 5 was changed or removed"):
        next(reading)


def test_what_is_no_ledger_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        Ledger(tmp_path)
    (tmp_path / "x.db").write_bytes(b"nothing like it" * 100)
    with pytest.raises(UserError, match="can't be read: file is not a database"):
        Ledger(str(tmp_path / "x.db"))
    sqlite3.connect(tmp_path / "y.db").execute("PRAGMA user_version = 3")
    with pytest.raises(UserError, match="older version of dora-rl"):
        Ledger(tmp_path / "y.db")
