"""Logging: one handler, the level of the config, and a file for the supervisor."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_rl.runtime import logs
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.data_plane import LocalDataPlane
from dora_rl.runtime.workers.main import run_worker
from tests.settings.workers import at, folder_of, start, supervisor

LEVELS = ["debug", "info", "warning", "error"]


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    yield
    logs.close()


def log_all_levels() -> None:
    logger = logging.getLogger("dora_rl.test")
    for level in LEVELS:
        logger.log(getattr(logging, level.upper()), "a message of level %s", level)


def test_a_second_call_replaces_the_handler(tmp_path: Path) -> None:
    for name in ("first", "second"):
        logs.configure("info", tmp_path / name)
        log_all_levels()
    for name in ("first", "second"):
        lines = (tmp_path / name).read_text().splitlines()
        assert [line.rpartition(" ")[2] for line in lines] == ["info", "warning", "error"]
    assert "INFO dora_rl.test: a message of level info" in lines[0]


@pytest.mark.parametrize("level", LEVELS)
def test_the_supervisor_logs_to_a_file_at_the_level_of_its_config(base: Path, level: str) -> None:
    with supervisor(base, at("logging.level", level)) as part:
        log_all_levels()
    text = (part.folder.logs / "supervisor.log").read_text()
    assert [one for one in LEVELS if f"a message of level {one}" in text] == LEVELS[LEVELS.index(level) :]
    log_all_levels()
    assert (part.folder.logs / "supervisor.log").read_text() == text, "the file is closed with the run"


@pytest.mark.parametrize("level", LEVELS)
def test_a_worker_logs_at_the_level_of_its_config(base: Path, capsys: pytest.CaptureFixture[str], level: str) -> None:
    ours, theirs = socket.socketpair()
    channel: Channel[m.FromWorker] = Channel(ours, m.FromWorker)  # type: ignore[arg-type]
    channel.send(start(folder_of(base, at("logging.level", level)), "reward", "reward0.1"))
    channel.send(m.StopWorker())
    run_worker(theirs, LocalDataPlane())
    written = capsys.readouterr().err
    assert ("started reward worker reward0.1" in written) == (level in ("debug", "info"))
    assert ("to supervisor: WorkerReady" in written) == (level == "debug")
    assert [type(message) for message in channel.receive()] == [m.WorkerReady]
    channel.close()
    theirs.close()
