"""Where the worker processes of a run come from: the interface, and its implementation for this machine.

Invariants:
- a worker communicates over the one link that its backend made for it; the end of the link is the end of the worker;
- `kill` returns when the worker and everything that it has started can do nothing more, or can reach the run no more;
- a worker that waits for resources has not failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Protocol

from dora_rl.core.cpu_cores import usable_cores
from dora_rl.core.errors import BundleError
from dora_rl.core.os_processes import alive
from dora_rl.core.types import Version
from dora_rl.runtime.launch.fork_server import Forked, ForkServer
from dora_rl.runtime.launch.reaper import KILL_SECONDS
from dora_rl.runtime.run_dir import RunDir

logger = logging.getLogger(__name__)

Link = Callable[[], tuple[socket.socket, socket.socket]]


class ProcessHandle(Protocol):
    """One worker process, as its backend knows it."""

    @property
    def link(self) -> socket.socket | None:
        """The connection to the worker; None until it has connected."""
        ...

    @property
    def node(self) -> str:
        """The node that the worker runs on: workers of one node share its cores."""
        ...

    @property
    def pending(self) -> bool:
        """Whether the worker still waits for resources."""
        ...

    def alive(self) -> bool: ...

    def failure(self) -> str:
        """Why the worker can't be reached any more, if the backend knows and the link does not show it; else empty."""
        ...

    def kill(self) -> None:
        """Make sure that the worker has ended."""
        ...


class Backend(Protocol):
    """Starts worker processes."""

    def on_connect(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever a worker has connected."""
        ...

    def start(self, role: str, worker_id: str, name: str) -> ProcessHandle:
        """Start a process for a worker, under a name that is unique per restart; it may connect later."""
        ...

    def cores(self, node: str) -> int:
        """The number of cores of a node."""
        ...

    def capacity(self) -> int | None:
        """For how many instances there are resources, if the run uses all of them; None if the config has a number."""
        ...

    def release(self, worker_id: str) -> None:
        """Free what is reserved for a worker: it will not be started again."""
        ...

    def version_retired(self, version: Version) -> None:
        """Free what is held of a version that was retired."""
        ...

    def discard_kv(self, name: str) -> None:
        """Free a KV bundle that will not be fetched."""
        ...

    def close(self) -> None:
        """Free everything; no process is started after this."""
        ...


class ForkedProcess:
    """A worker process of this machine."""

    node = ""
    pending = False

    def __init__(self, forked: Forked, link: socket.socket) -> None:
        self._pid, self._reaper = forked
        self.link = link

    def alive(self) -> bool:
        return alive(self._pid)

    def failure(self) -> str:
        return ""

    def kill(self) -> None:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self._pid, signal.SIGKILL)
        end = time.monotonic() + 2 * KILL_SECONDS  # the reaper gives up earlier, unless it is stopped
        while alive(self._reaper):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._reaper, signal.SIGKILL)
            time.sleep(0.001)


class LocalBackend:
    """This machine: workers are forked from a fork server and communicate over socket pairs."""

    def __init__(self, run_dir: RunDir, fork_server: ForkServer, link: Link = socket.socketpair) -> None:
        self._run_dir = run_dir
        self._fork_server = fork_server
        self._link = link
        self._cores = usable_cores()

    def on_connect(self, wake: Callable[[], None]) -> None:
        """Never called: a forked process is connected from the start."""

    def start(self, role: str, worker_id: str, name: str) -> ForkedProcess:
        ours, theirs = self._link()
        with theirs, (self._run_dir.logs / f"{worker_id}.log").open("ab") as log:
            forked = self._fork_server.fork(theirs, log)
        logger.info("forked %s worker %s: pid %d", role, name, forked.pid)
        return ForkedProcess(forked, ours)

    def cores(self, node: str) -> int:  # noqa: ARG002
        return self._cores

    def capacity(self) -> int | None:
        return None

    def release(self, worker_id: str) -> None:
        """Nothing is reserved for a worker."""

    def version_retired(self, version: Version) -> None:
        """The weight store has freed it."""

    def discard_kv(self, name: str) -> None:
        """Let the owner of the shared memory use it again."""
        from dora_rl.engine.kv_transfer.format import KvBundle

        with contextlib.suppress(BundleError):
            KvBundle.attach(name).release()

    def close(self) -> None:
        self._fork_server.close()
