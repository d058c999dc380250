"""What a run takes from the machine that it runs on. Tests hand in faulty parts; nothing else does."""

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
    """The parts."""

    fork_server: Callable[[Path], ForkServer] = ForkServer
    """Where processes of this machine come from."""
    link: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair
    """What they speak over."""
    clock: Callable[[], Nanoseconds] = time.monotonic_ns
    """What the run's clock follows."""
    connect: Callable[[Path], sqlite3.Connection] = connect
    """What the ledger writes with."""

    def backend(self, run_dir: RunDir) -> Backend:
        """Where the processes of a run come from."""
        return LocalBackend(run_dir, self.fork_server(run_dir.logs / "fork_server.log"), self.link)
