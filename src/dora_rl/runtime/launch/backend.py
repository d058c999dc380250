"""Where the processes of a run come from: a port, and this machine behind it.

Invariants:
- a process speaks over the one link that its host made for it, and its end is the end of that link;
- `kill` returns when the process and all that it has started can do nothing more, or be heard by nobody;
- a process that waits for room is not a process that fails.
"""

from __future__ import annotations

import contextlib
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
from dora_rl.runtime.launch.reaper import PATIENCE
from dora_rl.runtime.run_dir import RunDir

Link = Callable[[], tuple[socket.socket, socket.socket]]


class ProcessHandle(Protocol):
    """One process, as its host knows it."""

    @property
    def link(self) -> socket.socket | None:
        """What it speaks over, once it has connected."""
        ...

    @property
    def node(self) -> str:
        """Where it is: processes of one machine share its cores."""
        ...

    @property
    def pending(self) -> bool:
        """There is no room for it yet."""
        ...

    def alive(self) -> bool: ...

    def failure(self) -> str:
        """Why it will never speak again, where its host knows and its link does not tell; else empty."""
        ...

    def kill(self) -> None:
        """Make sure that it has ended."""
        ...


class Backend(Protocol):
    """Where processes come from."""

    def on_connect(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when a process has connected."""
        ...

    def start(self, role: str, worker_id: str, name: str) -> ProcessHandle:
        """Start a process for a place; it may connect later."""
        ...

    def cores(self, node: str) -> int:
        """How many there are."""
        ...

    def capacity(self) -> int | None:
        """For how many instances there is room, if all of it is to be used; None: their number is the run's affair."""
        ...

    def release(self, worker_id: str) -> None:
        """Nobody will fill this place any more."""
        ...

    def version_retired(self, version: Version) -> None:
        """A version was freed."""
        ...

    def discard_kv(self, name: str) -> None:
        """A bundle that nobody will fetch."""
        ...

    def close(self) -> None:
        """Nobody is started any more."""
        ...


class ForkedProcess:
    """A process of this machine."""

    node = ""
    pending = False

    def __init__(self, forked: Forked, link: socket.socket) -> None:
        self._pid, self._keeper = forked
        self.link = link

    def alive(self) -> bool:
        return alive(self._pid)

    def failure(self) -> str:
        return ""

    def kill(self) -> None:
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self._pid, signal.SIGKILL)
        end = time.monotonic() + 2 * PATIENCE  # the keeper gives up before, unless somebody has stopped it
        while alive(self._keeper):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._keeper, signal.SIGKILL)
            time.sleep(0.001)


class LocalBackend:
    """This machine: processes are forked from a nursery and speak over socket pairs."""

    def __init__(self, folder: RunDir, nursery: ForkServer, link: Link = socket.socketpair) -> None:
        self._folder = folder
        self._nursery = nursery
        self._link = link
        self._cores = usable_cores()

    def on_connect(self, wake: Callable[[], None]) -> None:
        """A process that is forked is connected."""

    def start(self, role: str, worker_id: str, name: str) -> ForkedProcess:  # noqa: ARG002
        ours, theirs = self._link()
        with theirs, (self._folder.logs / f"{worker_id}.log").open("ab") as log:
            return ForkedProcess(self._nursery.fork(theirs, log), ours)

    def cores(self, node: str) -> int:  # noqa: ARG002
        return self._cores

    def capacity(self) -> int | None:
        return None

    def release(self, worker_id: str) -> None:
        """A place is a name and no more."""

    def version_retired(self, version: Version) -> None:
        """The store has freed it."""

    def discard_kv(self, name: str) -> None:
        """Its owner may use the memory again."""
        from dora_rl.engine.kv_transfer.format import KvBundle

        with contextlib.suppress(BundleError):
            KvBundle.attach(name).taken()

    def close(self) -> None:
        self._nursery.close()
