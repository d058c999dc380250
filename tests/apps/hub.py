"""A stand-in for the Hugging Face Hub: a real HTTP server with the few endpoints that a push uses.

It keeps repositories in memory. A commit replaces a branch as a whole, or leaves it as it was; large files arrive
before it, by the LFS protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_right"


class Repo:
    """One repository."""

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.commits: list[tuple[str, str]] = []
        """Branch and message."""


class Hub:
    """The server's state, and what it refuses."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}
        """Status code by a part of `METHOD path`."""
        self.address = ""


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens on a free port of this machine."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, method: str) -> None:
        body = self._body()
        path = unquote(urlsplit(self.path).path)
        line = f"{method} {path}"
        self.hub.requests.append(line)
        refused = next((code for part, code in self.hub.refuse.items() if part in line), None)
        if refused is not None:
            self._send(refused, {"error": "refused by the test"})
        elif not path.startswith("/large/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, {"error": "Invalid username or password."})
        else:
            for pattern, handle in _ROUTES:
                found = re.fullmatch(pattern, line)
                if found:
                    self._send(*handle(self.hub, body, *found.groups()))
                    return
            self._send(404, {"error": f"the stand-in has no {line}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, code: int, document: Any) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(data)


# -- endpoints --------------------------------------------------------------------------------------------------


def _info(hub: Hub, _: bytes, name: str) -> tuple[int, Any]:
    if name not in hub.repos:
        return 404, {"error": "Repository not found"}
    repo = hub.repos[name]
    siblings = [{"rfilename": file} for file in repo.branches["main"]]
    return 200, {"id": name, "private": repo.private, "sha": "0" * 40, "tags": [], "downloads": 0, "siblings": siblings}


def _create(hub: Hub, body: bytes) -> tuple[int, Any]:
    asked = json.loads(body)
    name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
    if name in hub.repos:
        return 409, {"error": "You already created this model repo", "url": f"{hub.address}/{name}"}
    hub.repos[name] = Repo(private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return 200, {"url": f"{hub.address}/{name}"}


def _branch(hub: Hub, _: bytes, name: str, branch: str) -> tuple[int, Any]:
    branches = hub.repos[name].branches
    if branch in branches:
        return 409, {"error": "Reference already exists"}
    branches[branch] = dict(branches["main"])
    return 200, {}


def _tree(hub: Hub, _: bytes, name: str, branch: str) -> tuple[int, Any]:
    files = hub.repos[name].branches[branch]
    return 200, [{"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in files.items()]


def _validate(_hub: Hub, body: bytes) -> tuple[int, Any]:
    assert json.loads(body)["content"].startswith("---\n")
    return 200, {"errors": [], "warnings": []}


def _preupload(_hub: Hub, body: bytes, _name: str, _branch: str) -> tuple[int, Any]:
    files = json.loads(body)["files"]
    return 200, {
        "files": [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for one in files
        ]
    }


def _batch(hub: Hub, body: bytes, _name: str) -> tuple[int, Any]:
    objects = json.loads(body)["objects"]
    return 200, {
        "transfer": "basic",
        "objects": [
            {**one, "actions": {"upload": {"href": f"{hub.address}/large/{one['oid']}", "header": {}}}}
            for one in objects
        ],
    }


def _put(hub: Hub, body: bytes, oid: str) -> tuple[int, Any]:
    if hashlib.sha256(body).hexdigest() != oid:
        return 400, {"error": "the content has another digest"}
    hub.large[oid] = body
    return 200, {}


def _commit(hub: Hub, body: bytes, name: str, branch: str) -> tuple[int, Any]:
    repo = hub.repos[name]
    if branch not in repo.branches:
        return 404, {"error": "Revision Not Found"}
    files = dict(repo.branches[branch])
    summary = ""
    for line in body.splitlines():
        one = json.loads(line)
        kind, value = one["key"], one["value"]
        if kind == "header":
            summary = value["summary"]
        elif kind == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            files[value["path"]] = hub.large[value["oid"]]
        elif kind == "deletedFile":
            del files[value["path"]]
        else:
            return 400, {"error": f"unknown key {kind}"}
    repo.branches[branch] = files
    repo.commits.append((branch, summary))
    oid = f"{len(repo.commits):040x}"
    return 200, {"commitUrl": f"{hub.address}/{name}/commit/{oid}", "commitOid": oid}


_NAME = "([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (f"GET /api/models/{_NAME}", _info),
    ("POST /api/repos/create", _create),
    (f"POST /api/models/{_NAME}/branch/(.+)", _branch),
    (f"GET /api/models/{_NAME}/tree/([^/]+)", _tree),
    ("POST /api/validate-yaml", _validate),
    (f"POST /api/models/{_NAME}/preupload/(.+)", _preupload),
    (f"POST /{_NAME}[.]git/info/lfs/objects/batch", _batch),
    ("PUT /large/([0-9a-f]{64})", _put),
    (f"POST /api/models/{_NAME}/commit/(.+)", _commit),
]
