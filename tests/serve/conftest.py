"""A folder with copies of the small real run, and a client that has the token."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from dora_rl.apps.serve.app import make_app
from dora_rl.apps.serve.command import listen, make_server
from dora_rl.apps.serve.runs_folder import RunsFolder
from tests.apps.conftest import MadeRun, made_run

__all__ = ["made_run"]

TOKEN = "correct-horse"
PATIENCE = 120.0


@pytest.fixture
def runs(made_run: MadeRun, tmp_path: Path) -> Path:
    """A folder with one finished run, `small`, that a test may change."""
    folder = tmp_path / "runs"
    folder.mkdir()
    leave = shutil.ignore_patterns("weights", "tensorboard", "events.jsonl")
    shutil.copytree(made_run.folder.path, folder / "small", ignore=leave)
    return folder


def client_of(folder: Path, *, token: str | None = TOKEN, host: str = "127.0.0.1", **headers: str) -> TestClient:
    given = {"authorization": f"Bearer {TOKEN}"} | headers
    app = make_app(RunsFolder(folder), token=token, host=host)
    return TestClient(app, base_url="http://127.0.0.1:8642", headers=given)


@pytest.fixture
def client(runs: Path) -> TestClient:
    return client_of(runs)


def get(client: TestClient, path: str, **params: Any) -> Any:
    answer = client.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


@dataclass
class Server:
    """A real server on a free port."""

    url: str
    server: Any
    thread: threading.Thread

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def start_server(folder: Path, port: int = 0, token: str | None = TOKEN) -> Server:
    listener: socket.socket = listen("127.0.0.1", port)
    server = make_server(make_app(RunsFolder(folder), token=token, host="127.0.0.1"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    return Server(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)


@pytest.fixture
def server(runs: Path) -> Iterator[Server]:
    server = start_server(runs)
    yield server
    server.stop()


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
        yield client
