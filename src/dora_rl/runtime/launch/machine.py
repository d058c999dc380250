"""What a run takes from the machine that it runs on. Tests pass in faulty replacements; nothing else does."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dora_rl.core.types import Nanoseconds
from dora_rl.ledger.ledger import connect
from dora_rl.runtime.launch.backend import Backend, LocalBackend
from dora_rl.runtime.launch.fork_server import ForkServer
from dora_rl.runtime.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Makers of what a run needs from the machine."""

    fork_server: Callable[[Path], ForkServer] = ForkServer
    """Starts the fork server, with this log."""
    link: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair
    """Makes the connection between the supervisor and a worker."""
    clock: Callable[[], Nanoseconds] = time.monotonic_ns
    """The clock that the clock of the run follows."""
    connect: Callable[[Path], sqlite3.Connection] = connect
    """Opens the database of the ledger."""

    def backend(self, run_dir: RunDir) -> Backend:
        """The backend that starts the workers of a run."""
        return LocalBackend(run_dir, self.fork_server(run_dir.logs / "fork_server.log"), self.link)
