"""`dora-rl serve`, and the same server in a process beside a run for `dora-rl train --page`.

The address with the token is printed and not passed to a browser: the arguments of a process can be read by all users
of a machine. The server beside a run has a lower priority than the run, and ends when the pipe from it is closed, so it
never outlives the run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.apps.serve.guard import Guard

_INSTALL = "the live page requires starlette and uvicorn: pip install 'dora-rl[serve]'"
_NICE = 10


def serve(
    runs: Annotated[Path, typer.Argument(help="Folder of a run, or a folder with runs.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; default: only this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8642,
    no_token: Annotated[bool, typer.Option("--no-token", help="Ask for no token; only on this machine.")] = False,
    beside: Annotated[bool, typer.Option("--beside", hidden=True)] = False,
) -> None:
    """Serve a live page about a run, or about all runs in a folder. It only reads."""
    need_serve()
    from dora_rl.apps.serve.app import make_app
    from dora_rl.apps.serve.guard import is_loopback
    from dora_rl.apps.serve.runs_folder import RunsFolder

    if no_token and not is_loopback(host):
        raise UserError("--no-token is only for this machine: leave it out, or leave out --host")
    token = None if no_token else secrets.token_urlsafe(24)
    app = make_app(RunsFolder(runs), token=token, host=host)
    listener = listen(host, port)
    if beside:
        os.nice(_NICE)
    typer.echo(address(listener, host, token))
    sys.stdout.flush()
    _run(app, listener, beside=beside)


def need_serve() -> None:
    """Raise a `UserError` if the packages of the extra `serve` are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError(_INSTALL)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        raise UserError(
            f"can't listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from error
    return listener


def address(listener: socket.socket, host: str, token: str | None) -> str:
    """What to open in a browser."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}/" + ("" if token is None else f"?token={token}")


def make_server(app: Guard) -> Any:
    """A server for the application; it logs no addresses, since they may have the token."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _run(app: Guard, listener: socket.socket, *, beside: bool) -> None:
    server = make_server(app)
    if beside:

        def end_with_the_run() -> None:
            with contextlib.suppress(OSError):
                sys.stdin.buffer.read()
            server.should_exit = True

        threading.Thread(target=end_with_the_run, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


@contextlib.contextmanager
def page_beside(run: Path) -> Iterator[str]:
    """Serve the page of a run from a process of its own until the block ends; gives its address."""
    need_serve()
    command = [sys.executable, "-m", "dora_rl.apps.cli", "serve", str(run), "--port", "0", "--beside"]
    # A session of its own: an interrupt on the terminal is for the run, which closes the pipe when it ends.
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        where = process.stdout.readline().strip()
        if not where:
            raise UserError("the live page could not be started: see the message above, or leave out --page")
        yield where
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
