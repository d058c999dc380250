"""`dora-rl watch`: the same values as in the run itself, until it ends, without a trace in the run."""

from __future__ import annotations

import fcntl
import io
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dora_rl.apps import run_reader
from dora_rl.apps.cli import app
from dora_rl.apps.summary import summarise, totals
from dora_rl.apps.watch import WatchedRun, ending, watch_run
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import STEPS, MadeRun

FILES = ("metrics", "activity", "events")


@pytest.fixture
def copy(made_run: MadeRun, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(made_run.folder.path, tmp_path / "copy"))


class GrowingRun:
    """A copy of a run whose files grow whenever the watcher pauses, while its lock is held."""

    def __init__(self, folder: RunDir, parts: int, last: Callable[[], None] = lambda: None) -> None:
        self._whole = {name: getattr(folder, name).read_bytes() for name in FILES}
        self._folder, self._parts, self._last = folder, parts, last
        self._lock = folder.lock.open()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._part = 0
        self._grow()

    def _grow(self) -> None:
        """Half of each file is there from the beginning; parts end anywhere in a line."""
        for name, data in self._whole.items():
            end = len(data) * (self._parts + self._part) // (2 * self._parts)
            getattr(self._folder, name).write_bytes(data[:end])

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        if self._part < self._parts:
            self._part += 1
            self._grow()
        else:
            self._last()
            self._lock.close()


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))]


def steps_shown(text: str) -> list[str]:
    return re.findall(rf"^steps done (\d)/{STEPS}  reward", text, re.MULTILINE)


# -- a run that goes on -----------------------------------------------------------------------------------------


def test_a_running_run_is_watched_until_it_is_stopped(made_run: MadeRun) -> None:
    """A real one: the process that watches saw the first step, and ended by itself with the run."""
    first, *_, last = made_run.watched.splitlines()
    assert first.startswith(f"steps done 1/{STEPS}  reward ")
    shown, printed = (re.findall(r"reward \S+|\S+ tokens/s  \S+ s", text) for text in (first, made_run.interrupted))
    assert shown == printed, "the run itself printed the same; occupancy and accuracy may be newer"
    assert last == f"the run was stopped after 1 of {STEPS} steps; resume with: dora-rl train --resume runs/small"
    assert made_run.watch_code == 1
    assert "\x1b" not in made_run.watched


@pytest.mark.parametrize("parts", [1, 7])
def test_each_step_is_a_line_without_a_terminal(copy: RunDir, parts: int) -> None:
    whole = run_reader.read_metrics(copy).steps
    growing = GrowingRun(copy, parts)
    already = len(run_reader.read_metrics(copy).steps)
    output = io.StringIO()
    watch_run(copy, Console(file=output, width=200), growing.pause)
    assert 0 < already < STEPS
    # Of the steps before the start only the last one is shown.
    assert steps_shown(output.getvalue()) == [str(step) for step in range(already, STEPS + 1)]
    for step in range(already, STEPS):
        assert f"reward {whole[step]['reward/mean']:.3f}" in output.getvalue()


def test_a_terminal_shows_the_panel_and_keeps_the_last_one(copy: RunDir) -> None:
    growing = GrowingRun(copy, 3)
    output = io.StringIO()
    watch_run(
        copy,
        Console(file=output, force_terminal=True, width=80, height=30, legacy_windows=False),
        growing.pause,
    )
    lines = plain(output.getvalue())
    for word in ("reward", "versions", "staleness", "idle slots", "trainer"):
        assert sum(line.startswith(word) for line in lines) >= 4, word
    assert max(map(len, lines)) <= 80
    assert any(re.match(rf"steps done {STEPS}/{STEPS} [━╺╸]+ [\d.]+ s elapsed", line) for line in lines[-10:])


def test_a_process_that_is_lost_meanwhile_is_named_and_earlier_ones_are_not(copy: RunDir) -> None:
    with copy.activity.open("a") as file:
        file.write('{"note": "lost", "at": 1, "who": "i0.1", "reason": "early"}\n')

    def lose() -> None:
        with copy.activity.open("a") as file:
            file.write('{"note": "lost", "at": 5, "who": "i1.2", "reason": "killed by [bold] signal 9"}\n')

    growing = GrowingRun(copy, 1, lose)
    growing._part = 1
    growing._grow()
    output = io.StringIO()
    watch_run(copy, Console(file=output, width=200), growing.pause)
    assert "i1.2 is lost: killed by [bold] signal 9" in output.getvalue()
    assert "i0.1" not in output.getvalue()


def test_the_values_are_those_of_the_summary(made_run: MadeRun) -> None:
    watched = WatchedRun(made_run.folder)
    watched.update()
    values, summary = watched.values(), summarise(made_run.folder)
    assert (values.done, values.asked) == (summary.steps, summary.steps_asked)
    assert values.staleness == summary.staleness
    assert values.time == totals(run_reader.read_activity(made_run.folder).windows)[0]
    assert summary.rewards == (values.rewards[0], values.rewards[-1])
    assert summary.accuracy == (values.accuracy[0], values.accuracy[-1])
    assert (dict(values.running), dict(values.waiting)) == ({}, {})
    assert values.trainer == "waiting: finished"


# -- the end ----------------------------------------------------------------------------------------------------


def test_a_finished_run_is_shown_once(made_run: MadeRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")}
    done = CliRunner().invoke(app, ["watch", str(made_run.folder.path)], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert steps_shown(done.output) == [str(STEPS)]
    assert done.output.endswith(f"the run has finished: {STEPS} of {STEPS} steps\n")
    assert {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")} == before


def unfinish(ledger: sqlite3.Connection) -> None:
    ledger.execute("UPDATE steps SET published_at = NULL WHERE step = ?", (STEPS - 1,))
    ledger.commit()


def test_a_run_that_was_killed_is_told_from_one_that_was_stopped(copy: RunDir, tmp_path: Path) -> None:
    ledger = sqlite3.connect(copy.ledger)
    ledger.execute("PRAGMA journal_mode = WAL")
    unfinish(ledger)
    killed = RunDir(shutil.copytree(copy.path, tmp_path / "killed"))  # its files as a killed process leaves them
    ledger.close()
    for folder, how in ((copy, "was stopped"), (killed, "was killed")):
        sentence = (
            f"the run {how} after {STEPS - 1} of {STEPS} steps; resume with: dora-rl train --resume {folder.path}"
        )
        assert ending(folder) == (sentence, False)
        done = CliRunner().invoke(app, ["watch", str(folder.path)], env={"COLUMNS": "200"})
        assert done.exit_code == 1
        assert done.output.splitlines()[-1] == sentence


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes started here get interrupts, also if the tests run in the background of a shell, which ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_the_run_alone(copy: RunDir) -> None:
    with copy.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")}
        command = [sys.executable, "-m", "dora_rl.apps.cli", "watch", str(copy.path)]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, **options) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("steps done ")
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
        assert process.returncode == 130
        *shown, last = rest.splitlines()
        assert all(line.startswith("steps done ") for line in shown)  # on a slow machine it may have shown it again
        assert last == "left; the run is not affected"
        assert {path: path.stat().st_mtime_ns for path in copy.path.rglob("*")} == before


def test_a_run_that_has_not_started_is_refused(copy: RunDir) -> None:
    for name in FILES:
        getattr(copy, name).unlink()
    copy.ledger.unlink()
    done = CliRunner().invoke(app, ["watch", str(copy.path)])
    assert isinstance(done.exception, UserError)
    assert "has not started" in str(done.exception)
    output = io.StringIO()
    with copy.lock.open() as lock:  # one that is starting is waited for
        fcntl.flock(lock, fcntl.LOCK_EX)
        watch_run(copy, Console(file=output), lambda _: lock.close())
    assert output.getvalue() == ""
