"""The processes of a run and their lives.

Invariants:
- where a process comes from is its host's affair: this machine's nursery, or a cluster;
- every process has a name of its own for each life, also over restarts of the supervisor, so that nothing that is
  meant for a former life, or said by it, can be taken for the new one's;
- a process that ends is noticed by the end of its channel, at once;
- it is started again after a pause that doubles with each failure in a row; after too many it is given up. Failures
  are in a row if they follow soon, or if the process names the same cause each time, however long it lives;
- a process that ends over a question that it was asked is no failure of the process: it is started again at once;
- no process outlives its supervisor, however that ends.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from dora_rl.core.types import Nanoseconds
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.backend import Backend, ProcessHandle
from dora_rl.runtime.launch.cpu_allocation import niceness
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.transport.channel import Channel, ChannelError
from dora_rl.runtime.transport.messages import FromWorker, Message, StartWorker, StopWorker

_SOUND = 30.0
"""Seconds after which a process that lived so long no longer counts as failing in a row."""


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One place in the run, and the process that fills it now."""

    role: str
    worker_id: str
    """`i0`, `trainer`: stays the same over its lives."""
    threads: int = 1
    rank: int = 0
    ranks: int = 1
    incarnation: int = 0
    failures: int = 0
    """In a row."""
    reported_failure: str = ""
    """Why this life can't go on, in its own words."""
    previous_failure: str = ""
    """What the life before said."""
    handle: ProcessHandle | None = None
    """This life, as its host knows it."""
    channel: Channel[FromWorker] | None = None
    """None: it has not connected yet, or is no more."""
    started_at: float = 0.0
    last_message_at: float | None = None
    """When this life last said something; None: never yet."""
    restart_at: float | None = None
    given_up: bool = False
    last_failure: str = ""
    busy: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Of this life."""
        return f"{self.worker_id}.{self.incarnation}"

    @property
    def machine(self) -> str:
        """Where it is."""
        return "" if self.handle is None else self.handle.node

    def send(self, message: Message) -> None:
        """To a process that is not there, nothing is sent: whoever waits for an answer has a deadline."""
        if self.channel is not None:
            self.channel.send(message)


class ProcessManager:
    """All processes of a run."""

    def __init__(
        self,
        folder: RunDir,
        config: RunConfig,
        backend: Backend,
        origin: Nanoseconds,
        incarnations: Mapping[str, int],
    ) -> None:
        self.backend = backend
        self._incarnations = dict(incarnations)
        self._folder = folder
        self._config = config
        self._origin = origin
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.workers: list[WorkerProcess] = []
        backend.on_connect(self.wake)

    def start(self, role: str, worker_id: str, *, rank: int = 0, ranks: int = 1) -> WorkerProcess:
        """Fill a place."""
        process = WorkerProcess(
            role, worker_id, rank=rank, ranks=ranks, incarnation=self._incarnations.get(worker_id, 0)
        )
        self.workers.append(process)
        self._spawn(process)
        return process

    def cores(self, machine: str) -> int:
        """That rollout and training share there."""
        return self._config.threads or self.backend.cores(machine)

    def wake(self) -> None:
        """End a `wait` from another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def wait(self, seconds: float) -> list[tuple[WorkerProcess, list[FromWorker]]]:
        """What processes have said, waiting at most so long for the first to speak."""
        now = time.monotonic()
        for process in self.workers:
            if process.restart_at is not None and process.restart_at <= now:
                self._spawn(process)
            elif process.restart_at is not None:
                seconds = min(seconds, process.restart_at - now)
            self._connect(process)
            if process.channel is not None:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.channel.pending else 0)
                self._selector.modify(process.channel, events, process)
        heard = []
        for key, mask in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
                continue
            process = key.data
            if mask & selectors.EVENT_WRITE:
                process.channel.flush()
            if mask & selectors.EVENT_READ:
                heard.append((process, self._receive(process)))
        return heard

    def unresponsive(self, start: float, beat: float) -> list[tuple[WorkerProcess, str]]:
        """Who has not come up in so many seconds, or is an instance and has not been heard of for so many."""
        now = time.monotonic()
        found = []
        for process in self.workers:
            if process.handle is None:
                continue
            if failure := process.handle.failure():
                found.append((process, process.reported_failure or failure))
            elif process.handle.pending:
                process.started_at = now  # for room: nobody's failure, and no deadline
            elif process.last_message_at is None:
                if now - process.started_at > start:
                    found.append((process, f"it did not come up within {start:g} s"))
            elif process.role == "instance" and now - process.last_message_at > beat:
                found.append((process, f"no sign of life for {beat:g} s"))
        return found

    def lost(self, process: WorkerProcess, reason: str, *, by_question: bool = False) -> bool:
        """The process has ended, or shall: make sure of it and plan its next life; False if it is given up."""
        self._kill(process)
        if by_question:
            process.previous_failure = process.reported_failure = ""
            process.restart_at = time.monotonic()
            return True
        soon = time.monotonic() - process.started_at <= _SOUND
        again = bool(process.reported_failure) and process.reported_failure == process.previous_failure
        process.failures = process.failures + 1 if soon or again else 1
        process.previous_failure, process.reported_failure = process.reported_failure, ""
        process.last_failure = reason
        if process.failures > self._config.supervision.restarts:
            process.given_up = True
            return False
        pause = self._config.supervision.backoff_seconds * 2 ** (process.failures - 1)
        process.restart_at = time.monotonic() + pause
        return True

    def restart_with(self, other: WorkerProcess, process: WorkerProcess) -> None:
        """A process that is of no use without the other ends and begins with it."""
        self._kill(process)
        process.restart_at, process.given_up = other.restart_at, other.given_up

    def remove(self, process: WorkerProcess) -> None:
        """The process shall end, and its place with it; should the place be filled again, it is by another life."""
        self._kill(process)
        self._incarnations[process.worker_id] = process.incarnation
        self.workers.remove(process)
        self.backend.release(process.worker_id)

    def stop(self, *, patience: float) -> None:
        """End all: those who hear it within so many seconds, by themselves."""
        for process in self.workers:
            process.restart_at = None
            process.send(StopWorker())
        end = time.monotonic() + patience
        while time.monotonic() < end and any(process.handle and process.handle.alive() for process in self.workers):
            for process in self.workers:
                if process.channel is not None:
                    process.channel.flush()
            time.sleep(0.02)
        for process in self.workers:
            self._kill(process)
        self.backend.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _spawn(self, process: WorkerProcess) -> None:
        process.incarnation += 1
        process.restart_at = None
        process.started_at = time.monotonic()
        process.last_message_at = None
        process.reported_failure = ""
        process.busy = set()
        process.handle = self.backend.start(process.role, process.worker_id, process.name)
        self._connect(process)

    def _connect(self, process: WorkerProcess) -> None:
        """Take up the connection to a process that has come up, and tell it who it is."""
        if process.channel is not None or process.handle is None or process.handle.link is None:
            return
        process.channel = Channel(process.handle.link, FromWorker, process.name)  # type: ignore[arg-type]
        self._selector.register(process.channel, selectors.EVENT_READ, process)
        process.send(
            StartWorker(
                role=process.role,
                name=process.name,
                config=self._config.model_dump_json().encode(),
                folder=str(self._folder.path.resolve()),
                base=str(self._folder.base()),
                origin=self._origin,
                threads=process.threads,
                niceness=self._niceness(process),
                rank=process.rank,
                ranks=process.ranks,
            )
        )

    def _niceness(self, process: WorkerProcess) -> int:
        """Who consumes comes first: the trainer takes what it needs of shared cores, rollout has all the rest."""
        if process.role != "instance":
            return 0
        overlap = self._config.control.mode_spec.overlaps or process.worker_id == "evaluator"
        return niceness(self.cores(process.machine), self._config.rollout.instances, overlap=overlap)

    def _receive(self, process: WorkerProcess) -> list[FromWorker]:
        """What a process says; one whose words can't be understood is as good as dead."""
        assert process.channel is not None
        try:
            said = process.channel.receive()
        except ChannelError as error:
            process.reported_failure = str(error)
            process.channel.closed = True
            return []
        if said:
            process.last_message_at = time.monotonic()
        return said

    def _kill(self, process: WorkerProcess) -> None:
        if process.channel is not None:
            self._selector.unregister(process.channel)
            process.channel.close()
            process.channel = None
        if process.handle is not None:
            process.handle.kill()
            process.handle = None
