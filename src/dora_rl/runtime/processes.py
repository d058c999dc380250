"""The processes of a run and their lives.

Invariants:
- every process has a name of its own for each life, also over restarts of the supervisor, so that nothing that is
  meant for a former life, or said by it, can be taken for the new one's;
- a process that ends is noticed by the end of its channel, at once;
- it is started again after a pause that doubles with each failure in a row; after too many it is given up. Failures
  are in a row if they follow soon, or if the process names the same cause each time, however long it lives;
- no process outlives its supervisor, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dora_rl.core.nouns import Nanoseconds
from dora_rl.core.processes import alive
from dora_rl.runtime.channel import Channel, ChannelError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.folder import RunFolder
from dora_rl.runtime.messages import FromProcess, Message, Start, Stop
from dora_rl.runtime.nursery import Nursery

Link = Callable[[], tuple[socket.socket, socket.socket]]
_SOUND = 30.0
"""Seconds after which a process that lived so long no longer counts as failing in a row."""


@dataclass(slots=True, eq=False)
class Process:
    """One place in the run, and the process that fills it now."""

    role: str
    place: str
    """`i0`, `trainer`: stays the same over its lives."""
    threads: int
    life: int = 0
    failures: int = 0
    """In a row."""
    said: str = ""
    """Why this life can't go on, in its own words."""
    cause: str = ""
    """What the life before said."""
    pid: int | None = None
    channel: Channel[FromProcess] | None = None
    born: float = 0.0
    heard: float | None = None
    """When this life last said something; None: never yet."""
    restart_at: float | None = None
    given_up: bool = False
    last_words: str = ""
    busy: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Of this life."""
        return f"{self.place}.{self.life}"

    def send(self, message: Message) -> None:
        """To a process that is not there, nothing is sent: whoever waits for an answer has a deadline."""
        if self.channel is not None:
            self.channel.send(message)


class Processes:
    """All processes of a run."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        nursery: Nursery,
        origin: Nanoseconds,
        lives: Mapping[str, int],
        link: Link = socket.socketpair,
    ) -> None:
        self._nursery = nursery
        self._lives = lives
        self._link = link
        self._folder = folder
        self._config = config
        self._origin = origin
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.all: list[Process] = []

    def start(self, role: str, place: str, threads: int) -> Process:
        """Fill a place."""
        process = Process(role, place, threads, life=self._lives.get(place, 0))
        self.all.append(process)
        self._spawn(process)
        return process

    def wake(self) -> None:
        """End a `wait` from another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def wait(self, seconds: float) -> list[tuple[Process, list[FromProcess]]]:
        """What processes have said, waiting at most so long for the first to speak."""
        now = time.monotonic()
        for process in self.all:
            if process.restart_at is not None and process.restart_at <= now:
                self._spawn(process)
            elif process.restart_at is not None:
                seconds = min(seconds, process.restart_at - now)
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

    def silent(self, start: float, beat: float) -> list[tuple[Process, str]]:
        """Who has not come up in so many seconds, or is an instance and has not been heard of for so many."""
        now = time.monotonic()
        found = []
        for process in self.all:
            if process.channel is None:
                continue
            if process.heard is None:
                if now - process.born > start:
                    found.append((process, f"it did not come up within {start:g} s"))
            elif process.role == "instance" and now - process.heard > beat:
                found.append((process, f"no sign of life for {beat:g} s"))
        return found

    def bury(self, process: Process, reason: str) -> bool:
        """The process has ended, or shall: make sure of it and plan its next life; False if it is given up."""
        self._kill(process)
        soon = time.monotonic() - process.born <= _SOUND
        again = bool(process.said) and process.said == process.cause
        process.failures = process.failures + 1 if soon or again else 1
        process.cause, process.said = process.said, ""
        process.last_words = reason
        if process.failures > self._config.supervision.restarts:
            process.given_up = True
            return False
        pause = self._config.supervision.backoff_seconds * 2 ** (process.failures - 1)
        process.restart_at = time.monotonic() + pause
        return True

    def stop(self, *, patience: float) -> None:
        """End all: those who hear it within so many seconds, by themselves."""
        for process in self.all:
            process.restart_at = None
            process.send(Stop())
        end = time.monotonic() + patience
        while time.monotonic() < end and any(_alive(process) for process in self.all):
            for process in self.all:
                if process.channel is not None:
                    process.channel.flush()
            time.sleep(0.02)
        for process in self.all:
            self._kill(process)
        self._nursery.close()
        self._selector.close()
        self._woken.close()
        self._wake.close()

    def _spawn(self, process: Process) -> None:
        ours, theirs = self._link()
        process.life += 1
        process.restart_at = None
        process.born = time.monotonic()
        process.heard = None
        process.said = ""
        process.busy = set()
        with (self._folder.logs / f"{process.place}.log").open("ab") as log:
            process.pid = self._nursery.fork(theirs, log)
        theirs.close()
        process.channel = Channel(ours, FromProcess)  # type: ignore[arg-type]
        self._selector.register(process.channel, selectors.EVENT_READ, process)
        process.send(
            Start(
                role=process.role,
                name=process.name,
                config=self._config.model_dump_json().encode(),
                folder=str(self._folder.path),
                origin=self._origin,
                threads=process.threads,
            )
        )

    def _receive(self, process: Process) -> list[FromProcess]:
        """What a process says; one whose words can't be understood is as good as dead."""
        assert process.channel is not None
        try:
            said = process.channel.receive()
        except ChannelError as error:
            process.said = str(error)
            process.channel.closed = True
            return []
        if said:
            process.heard = time.monotonic()
        return said

    def _kill(self, process: Process) -> None:
        if process.channel is not None:
            self._selector.unregister(process.channel)
            process.channel.close()
            process.channel = None
        if process.pid is not None:
            # One that was just forked has no group of its own yet.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(process.pid, signal.SIGKILL)
            while _alive(process):
                time.sleep(0.001)
            process.pid = None


def _alive(process: Process) -> bool:
    return process.pid is not None and alive(process.pid)
