"""The routes of the live page: static files of the package, a JSON API, and a stream of changes for each run.

The stream sends an event whenever the files of the run have grown; the event says which, and the page asks for what it
shows. The id of an event is the position in all files, so a browser that returns after a lost connection sends the last
one it saw (`Last-Event-ID`) and learns at once what it has missed, or that it has missed nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dora_rl.apps.exports.prometheus import CONTENT_TYPE
from dora_rl.apps.serve.guard import Guard
from dora_rl.apps.serve.lanes import marks
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.overview import overview
from dora_rl.apps.serve.runs_folder import RunsFolder
from dora_rl.apps.serve.system import log_tail, system
from dora_rl.apps.serve.training import training
from dora_rl.apps.serve.trajectories import FILTERS, trajectories, trajectory
from dora_rl.apps.serve.versions import versions
from dora_rl.apps.timeline import palette
from dora_rl.core.errors import DoraError, UserError
from dora_rl.core.types import SECOND

if TYPE_CHECKING:
    from starlette.requests import Request

View = Callable[[LiveRun, "Query"], Any]

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_INTERVAL = 0.5
"""Seconds between two looks at the files of a run."""
_HEARTBEAT = 30
"""After so many looks without a change a comment is sent, so that a lost connection is noticed."""
_RETRY_MS = 1000
"""How long a browser waits before it connects again."""
_MOST_COLUMNS = 4096
_UNREADABLE = (DoraError, KeyError, TypeError, ValueError)
"""What reading a run raises that is damaged or was written by another version of dora-rl."""


class Query:
    """The parameters of a request; a value that can't be used raises `UserError`."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params
        self.path = request.path_params

    def number(self, name: str, default: float | None = None) -> float | None:
        """A finite number."""
        text = self._given.get(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"'{name}' must be a number")
        return value

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """An integer, moved into its range."""
        value = self.number(name)
        return default if value is None else max(least, min(most, int(value)))

    def text(self, name: str) -> str:
        """A text; empty if it is not given."""
        return self._given.get(name, "")


def make_app(folder: RunsFolder, *, token: str | None, host: str) -> Guard:
    """The application, guarded."""

    async def runs(_: Request) -> Response:
        return _json(await run_in_threadpool(lambda: {"runs": [_entry(run) for run in folder.runs()], **palette()}))

    def view(answer: View) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(_answer, folder, answer, request)

        return endpoint

    async def prometheus(request: Request) -> Response:
        """What a Prometheus server scrapes."""
        return await run_in_threadpool(_metrics, folder, request.path_params["run"])

    async def stream(request: Request) -> Response:
        run = await run_in_threadpool(folder.get, request.path_params["run"])
        if run is None:
            return _json({"error": "there is no such run"}, 404)
        seen = request.headers.get("last-event-id", "")
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(changes(run, seen), media_type="text/event-stream", headers=headers)

    routes = [
        Route("/", static("index.html")),
        *(Route(f"/static/{name}", static(name)) for name in static_files() if name != "index.html"),
        Route("/api/runs", runs),
        *(Route(f"/api/runs/{{run}}/{name}", view(answer)) for name, answer in VIEWS.items()),
        Route("/api/runs/{run}/stream", stream),
        Route("/metrics/{run}", prometheus),
    ]
    return Guard(Starlette(routes=routes), token=token, host=host)


def _answer(folder: RunsFolder, answer: View, request: Request) -> Response:
    run = folder.get(request.path_params["run"])
    if run is None:
        return _json({"error": "there is no such run"}, 404)
    try:
        with run.lock:
            return _json(answer(run, Query(request)))
    except UserError as error:
        return _json({"error": str(error)}, 422)
    except _UNREADABLE as error:
        return _json({"error": f"the run is damaged, or of another version of dora-rl: {error!r}"}, 422)


def _metrics(folder: RunsFolder, name: str) -> Response:
    run = folder.get(name)
    if run is None:
        return Response("there is no such run\n", 404, media_type="text/plain")
    try:
        with run.lock:
            return Response(run.prometheus.text(), media_type=CONTENT_TYPE)
    except _UNREADABLE as error:
        return Response(f"the run can't be read: {error}\n", 422, media_type="text/plain")


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _entry(run: LiveRun) -> dict[str, Any]:
    try:
        found = run.progress()
    except _UNREADABLE:
        return {"id": run.name, "state": "unreadable"}
    return {
        "id": run.name,
        "state": found.state,
        "steps": found.steps,
        "steps_asked": found.steps_asked,
        "reward": None if found.rewards is None else found.rewards[1],
        "accuracy": None if found.accuracy is None else found.accuracy[1][1],
    }


# -- views --------------------------------------------------------------------------------------------------------


def timeline(run: LiveRun, query: Query) -> dict[str, Any]:
    """The lanes between two times in seconds, in as many columns as the page has pixels."""
    run.refresh()
    start, end = run.span()
    low = max(start, round((query.number("from", start / SECOND) or 0.0) * SECOND))
    high = min(end, round((query.number("to", end / SECOND) or 0.0) * SECOND))
    high = max(low + 1, high)
    columns = query.whole("width", 1200, 16, _MOST_COLUMNS)
    first = query.whole("first", 0, 0, max(0, len(run.lanes.slots) - 1))
    known = {note["version"] for note in run.notes if note["note"] == "published"}
    # A crash may lose a note; the ledger has all steps.
    lost = [
        {"note": "published", "at": at, "version": step + 1}
        for step, at in run.facts().published.items()
        if step + 1 not in known
    ]
    return {
        "whole": [start / SECOND, end / SECOND],
        "from": low / SECOND,
        "to": high / SECOND,
        **run.lanes.view(low, high, columns, first),
        **marks([*run.notes, *lost], low, high, columns // 4),
    }


def trajectory_list(run: LiveRun, query: Query) -> dict[str, Any]:
    """A page of trajectories by filter."""
    given: dict[str, Any] = {name: query.number(name) for name in FILTERS if name != "state"}
    given["state"] = query.text("state") or None
    given = {name: value for name, value in given.items() if value is not None}
    page = query.whole("page", 0, 0, 1 << 40)
    recorded, order = bool(query.text("recorded")), query.text("order") or "newest"
    return trajectories(run, given, text=query.text("text"), recorded=recorded, order=order, page=page)


VIEWS: dict[str, View] = {
    "overview": lambda run, _: overview(run),
    "timeline": timeline,
    "versions": lambda run, _: versions(run),
    "training": lambda run, query: training(run, query.whole("width", 300, 16, 2000)),
    "trajectories": trajectory_list,
    "trajectories/{number:int}": lambda run, query: trajectory(run, query.path["number"]),
    "system": lambda run, _: system(run),
    "log": lambda run, query: log_tail(run, query.text("name")),
}


# -- the stream -----------------------------------------------------------------------------------------------------


async def changes(run: LiveRun, seen: str) -> AsyncIterator[bytes]:
    """Server-sent events: one at once unless the client has seen everything, then one after each change."""
    yield f"retry: {_RETRY_MS}\n\n".encode()
    quiet = 0
    while True:
        position = await run_in_threadpool(run.position)
        now = " ".join(f"{name}={value}" for name, value in position.items())
        if now != seen:
            before = dict(part.partition("=")[::2] for part in seen.split(" "))
            changed = [name for name, value in position.items() if before.get(name) != value]
            data = msgspec.json.encode({"changed": changed, "running": position["running"] == "1"}).decode()
            yield f"id: {now}\nevent: change\ndata: {data}\n\n".encode()
            seen, quiet = now, 0
        elif quiet % _HEARTBEAT == 0:
            yield b": nothing new\n\n"
        quiet += 1
        await asyncio.sleep(_INTERVAL)


# -- static files ---------------------------------------------------------------------------------------------------


def static_files() -> list[str]:
    """Names of the files of the page."""
    return sorted(file.name for file in resources.files(__package__).joinpath("static").iterdir())


def static(name: str) -> Callable[[Request], Any]:
    """The endpoint of one file of the page."""
    data = resources.files(__package__).joinpath("static", name).read_bytes()
    kind = _TYPES[name[name.rindex(".") :]]

    async def endpoint(_: Request) -> Response:
        return Response(data, media_type=kind)

    return endpoint
