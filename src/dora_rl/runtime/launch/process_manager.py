"""The worker processes of a run: starting them, their channels, and restarts.

Invariants:
- where a process runs is decided by the backend: the fork server of this machine, or a Ray cluster;
- every process has a name that is unique per restart, also across restarts of the supervisor, so that nothing that is
  meant for, or sent by, a former incarnation can be taken for the current one's;
- the end of a process is noticed immediately, by the end of its channel;
- a process that ended is restarted after a pause that doubles with each failure in a row; after too many it is given
  up. Failures are in a row if they follow each other soon, or if the process reports the same cause each time;
- a process that ends because of a request that it handled has not failed: it is restarted immediately;
- no process outlives its supervisor, however the supervisor ends.

Restarts are managed here and not by Ray or a service manager, since the orchestrator has to learn of every loss before
the next incarnation joins.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dora_rl.core.types import Nanoseconds
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.backend import Backend, ProcessHandle
from dora_rl.runtime.launch.cpu_allocation import niceness
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.transport.channel import Channel, ChannelError
from dora_rl.runtime.transport.messages import FromWorker, Message, StartWorker, StopWorker

logger = logging.getLogger(__name__)

_STABLE_SECONDS = 30.0
"""A process that lived longer than this does not count as failing in a row."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One worker of a run, across its restarts."""

    role: str
    worker_id: str
    """`i0`, `trainer`: the same for all incarnations."""
    threads: int = 1
    rank: int = 0
    ranks: int = 1
    incarnation: int = 0
    failures: int = 0
    """Failures in a row."""
    reported_failure: str = ""
    """Why this incarnation can't continue, as it reported."""
    previous_failure: str = ""
    """What the incarnation before it reported."""
    handle: ProcessHandle | None = None
    """The process, as its backend knows it."""
    channel: Channel[FromWorker] | None = None
    """None: the process has not connected yet, or has ended."""
    writing: bool = False
    """The selector waits for room to send."""
    started_at: float = 0.0
    last_message_at: float | None = None
    """When this incarnation last sent something; None: never yet."""
    restart_at: float | None = None
    given_up: bool = False
    last_failure: str = ""

    @property
    def name(self) -> str:
        """Process name, unique per restart."""
        return f"{self.worker_id}.{self.incarnation}"

    @property
    def node(self) -> str:
        """The node that it runs on."""
        return "" if self.handle is None else self.handle.node

    def report_failure(self, reason: str) -> None:
        """Keep why this incarnation can't continue; the first reason counts."""
        self.reported_failure = self.reported_failure or reason

    def succeeded(self) -> None:
        """The process has done useful work, so earlier failures no longer count as in a row."""
        self.failures = 0

    def send(self, message: Message) -> None:
        """Send, if the process is there; a sender that waits for an answer has a deadline."""
        if self.channel is not None:
            self.channel.send(message)


class ProcessManager:
    """All worker processes of a run."""

    def __init__(
        self,
        run_dir: RunDir,
        config: RunConfig,
        backend: Backend,
        origin: Nanoseconds,
        incarnations: Mapping[str, int],
    ) -> None:
        self.backend = backend
        self._incarnations = dict(incarnations)
        self._run_dir = run_dir
        self._config = config
        self._origin = origin
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.workers: list[WorkerProcess] = []
        self.starts = 0
        """Grows when a process is started or connects."""
        backend.on_connect(self.wake)

    def start(self, role: str, worker_id: str, *, rank: int = 0, ranks: int = 1) -> WorkerProcess:
        """Add a worker and start its process."""
        worker = WorkerProcess(
            role, worker_id, rank=rank, ranks=ranks, incarnation=self._incarnations.get(worker_id, 0)
        )
        self.workers.append(worker)
        self._spawn(worker)
        return worker

    def cores(self, node: str) -> int:
        """Cores that rollout and training share on a node."""
        return self._config.threads or self.backend.cores(node)

    def wake(self) -> None:
        """End a `wait` from another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def wait(self, seconds: float) -> list[tuple[WorkerProcess, list[FromWorker]]]:
        """The messages of all workers, waiting at most this long for the first one."""
        now = time.monotonic()
        for worker in self.workers:
            if worker.restart_at is not None and worker.restart_at <= now:
                self._spawn(worker)
            elif worker.restart_at is not None:
                seconds = min(seconds, worker.restart_at - now)
            self._connect(worker)
            if worker.channel is not None and bool(worker.channel.pending) != worker.writing:
                worker.writing = not worker.writing
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.writing else 0)
                self._selector.modify(worker.channel, events, worker)
        received = []
        for key, mask in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
                continue
            worker = key.data
            if mask & selectors.EVENT_WRITE:
                worker.channel.flush()
            if mask & selectors.EVENT_READ:
                received.append((worker, self._receive(worker)))
        return received

    def unresponsive(self, start: float, heartbeat: float) -> list[tuple[WorkerProcess, str]]:
        """Workers that did not come up within `start` seconds, and instances silent for `heartbeat` seconds."""
        now = time.monotonic()
        found = []
        for worker in self.workers:
            if worker.handle is None:
                continue
            if failure := worker.handle.failure():
                found.append((worker, worker.reported_failure or failure))
            elif worker.handle.pending:
                worker.started_at = now  # it waits for resources, which has no deadline and is no failure
            elif worker.last_message_at is None:
                if now - worker.started_at > start:
                    found.append((worker, f"it did not come up within {start:g} s"))
            elif worker.role == "instance" and now - worker.last_message_at > heartbeat:
                found.append((worker, f"no sign of life for {heartbeat:g} s"))
        return found

    def lost(self, worker: WorkerProcess, reason: str, *, by_request: bool = False) -> bool:
        """Make sure that a process has ended, and schedule its restart; False if the worker is given up."""
        self._kill(worker)
        if by_request:
            worker.previous_failure = worker.reported_failure = ""
            worker.restart_at = time.monotonic()
            return True
        soon = time.monotonic() - worker.started_at <= _STABLE_SECONDS
        again = bool(worker.reported_failure) and worker.reported_failure == worker.previous_failure
        worker.failures = worker.failures + 1 if soon or again else 1
        worker.previous_failure, worker.reported_failure = worker.reported_failure, ""
        worker.last_failure = reason
        if worker.failures > self._config.supervision.restarts:
            worker.given_up = True
            return False
        pause = self._config.supervision.backoff_seconds * 2 ** (worker.failures - 1)
        worker.restart_at = time.monotonic() + pause
        return True

    def restart_with(self, other: WorkerProcess, worker: WorkerProcess) -> None:
        """End a process that is of no use without another, and restart it together with that one."""
        self._kill(worker)
        worker.restart_at, worker.given_up = other.restart_at, other.given_up

    def remove(self, worker: WorkerProcess) -> None:
        """End a process and remove its worker; if the worker id is used again, it is by another incarnation."""
        self._kill(worker)
        self._incarnations[worker.worker_id] = worker.incarnation
        self.workers.remove(worker)
        self.backend.release(worker.worker_id)

    def stop(self, *, patience: float) -> None:
        """End all processes; they have this many seconds to exit by themselves."""
        for worker in self.workers:
            worker.restart_at = None
            worker.send(StopWorker())
        end = time.monotonic() + patience
        while time.monotonic() < end and any(worker.handle and worker.handle.alive() for worker in self.workers):
            for worker in self.workers:
                if worker.channel is not None:
                    worker.channel.flush()
            time.sleep(0.02)
        for worker in self.workers:
            self._kill(worker)
        self.backend.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _spawn(self, worker: WorkerProcess) -> None:
        worker.incarnation += 1
        worker.restart_at = None
        worker.started_at = time.monotonic()
        worker.last_message_at = None
        worker.reported_failure = ""
        worker.handle = self.backend.start(worker.role, worker.worker_id, worker.name)
        self.starts += 1
        logger.info("started %s (%s)", worker.name, worker.role)
        self._connect(worker)

    def _connect(self, worker: WorkerProcess) -> None:
        """Take up the connection to a process that has come up, and send it its role."""
        if worker.channel is not None or worker.handle is None or worker.handle.link is None:
            return
        worker.channel = Channel(worker.handle.link, FromWorker, worker.name)  # type: ignore[arg-type]
        worker.writing = False
        self.starts += 1
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.send(
            StartWorker(
                role=worker.role,
                name=worker.name,
                config=self._config.model_dump_json().encode(),
                folder=str(self._run_dir.path.resolve()),
                base=str(self._run_dir.base()),
                origin=self._origin,
                threads=worker.threads,
                niceness=self._niceness(worker),
                rank=worker.rank,
                ranks=worker.ranks,
            )
        )

    def _niceness(self, worker: WorkerProcess) -> int:
        """The consumer comes first: the trainer takes what it needs of shared cores, rollout gets the rest."""
        if worker.role != "instance":
            return 0
        overlap = self._config.control.mode_spec.overlaps or worker.worker_id == "evaluator"
        return niceness(self.cores(worker.node), self._config.rollout.instances, overlap=overlap)

    def _receive(self, worker: WorkerProcess) -> list[FromWorker]:
        """The messages of a worker; one that sends what can't be decoded is treated as ended."""
        assert worker.channel is not None
        try:
            messages = worker.channel.receive()
        except ChannelError as error:
            worker.report_failure(str(error))
            worker.channel.closed = True
            return []
        if messages:
            worker.last_message_at = time.monotonic()
        return messages

    def _kill(self, worker: WorkerProcess) -> None:
        if worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None
        if worker.handle is not None:
            worker.handle.kill()
            worker.handle = None
