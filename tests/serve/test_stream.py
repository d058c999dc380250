"""The stream of changes: live updates, returning after a lost connection, and the server beside a run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest

from dora_rl.apps.serve.command import page_beside
from dora_rl.core.errors import UserError
from tests.serve.conftest import PATIENCE, TOKEN, Server, start_server


class Event(NamedTuple):
    id: str
    changed: list[str]
    running: bool


@contextlib.contextmanager
def stream(http: httpx.Client, last: str | None = None) -> Iterator[Iterator[Event | None]]:
    """The events of a connection; None for a comment."""
    headers = {} if last is None else {"last-event-id": last}
    with http.stream("GET", "/api/runs/small/stream", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer)


def _events(answer: httpx.Response) -> Iterator[Event | None]:
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line.startswith(":"):
            yield None
        elif line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            data: dict[str, Any] = json.loads(fields["data"])
            yield Event(fields["id"], data["changed"], data["running"])
            fields = {}


def grow(runs: Path, name: str) -> None:
    with (runs / "small" / name).open("a") as file:
        file.write('{"note": "nothing", "at": 0, "trajectory": -1}\n')


def test_a_change_is_sent_while_connected(http: httpx.Client, runs: Path) -> None:
    with stream(http) as events:
        first = next(event for event in events if event is not None)
        assert set(first.changed) == {"metrics", "activity", "samples", "ledger", "running"}
        grow(runs, "activity.jsonl")
        assert next(event for event in events if event is not None).changed == ["activity"]
        grow(runs, "metrics.jsonl")
        assert next(event for event in events if event is not None).changed == ["metrics"]


def test_who_returns_learns_at_once_what_was_missed(http: httpx.Client, runs: Path) -> None:
    with stream(http) as events:
        seen = next(event for event in events if event is not None)
    with stream(http, seen.id) as events:
        assert next(events) is None, "nothing was missed"
    grow(runs, "samples.jsonl")
    with stream(http, seen.id) as events:
        missed = next(events)
    assert missed is not None
    assert missed.changed == ["samples"]
    with stream(http, "an id of another server") as events:
        anew = next(events)
    assert anew is not None
    assert len(anew.changed) == 5


def test_a_server_that_comes_back_continues_the_stream(runs: Path) -> None:
    server = start_server(runs)
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        with stream(http) as events:
            seen = next(event for event in events if event is not None)
            server.stop()  # it does not wait for streams that never end
        with pytest.raises(httpx.ConnectError):
            http.get("/api/runs")
        grow(runs, "activity.jsonl")
        again = start_server(runs, port=int(server.url.rpartition(":")[2]))
        with stream(http, seen.id) as events:
            missed = next(events)
        again.stop()
    assert missed is not None
    assert missed.changed == ["activity"]


def test_the_stream_says_when_a_run_ends(http: httpx.Client, runs: Path) -> None:
    with (runs / "small" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with stream(http) as events:
            first = next(event for event in events if event is not None)
            fcntl.flock(lock, fcntl.LOCK_UN)
            last = next(event for event in events if event is not None)
    assert (first.running, last.running, last.changed) == (True, False, ["running"])


# -- the command ----------------------------------------------------------------------------------------------------


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dora_rl.apps.cli", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_the_page_beside_a_run_ends_with_it(runs: Path) -> None:
    with httpx.Client(timeout=PATIENCE, trust_env=False, follow_redirects=True) as http:
        with page_beside(runs / "small") as address:
            base = address.partition("?")[0]
            assert http.get(base).status_code == 401
            assert http.get(address).status_code == 200
            assert http.get(f"{base}api/runs/small/overview").json()["name"] == "small"
        with pytest.raises(httpx.ConnectError):
            http.get(base)


def test_mistakes_are_named_in_one_sentence(server: Server, runs: Path) -> None:
    port = server.url.rpartition(":")[2]
    for arguments, problem in (
        (["nowhere"], "there is no folder 'nowhere'"),
        ([str(runs), "--host", "0.0.0.0", "--no-token"], "--no-token is only for this machine"),
        ([str(runs), "--port", port], "choose another --port"),
    ):
        done = serve(*arguments)
        assert done.returncode == 2
        assert problem in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_without_its_packages_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"dora-rl\[serve\]"), page_beside(runs / "small"):
        pass
