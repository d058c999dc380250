"""The parts of a run in the test's own process, each told its settings as in a run: file, record, first message.

A part is built from the `Start` message that the supervisor would send it and hears the messages that it would hear;
what it says is kept.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import InstanceSpec, SlotId
from dora_rl.ledger.ledger import Ledger
from dora_rl.runtime.launch.machine import Machine
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.run import Run
from dora_rl.runtime.supervisor.scaling import Scaling
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.transport.channel import Channel
from dora_rl.runtime.transport.data_plane import LocalDataPlane
from dora_rl.runtime.workers.rollout import RolloutWorker
from dora_rl.runtime.workers.trainer import TrainerWorker
from tests.runtime.making import make_run, merged, settings

_NUMBERS = itertools.count()


def tree_with(base: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """The small job's settings with these put over them."""
    tree = settings(base)
    for change in changes:
        tree = merged(tree, change)
    return tree


def at(path: str, value: Any) -> dict[str, Any]:
    """One dotted key as a tree."""
    for part in reversed(path.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


def folder_of(base: Path, *changes: dict[str, Any]) -> RunDir:
    """A run that has not begun."""
    return make_run(base, f"settings-{os.getpid()}-{next(_NUMBERS)}", tree_with(base, *changes))


def start(folder: RunDir, role: str, name: str = "i0.1") -> m.StartWorker:
    """The first message of the supervisor to a process, over the wire."""
    message = m.StartWorker(
        role=role,
        name=name,
        config=folder.read().model_dump_json().encode(),
        folder=str(folder.path.resolve()),
        base=str(folder.base()),
        origin=0,
        threads=1,
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.StartWorker)


class Line:
    """The channel of a worker: keeps the messages that it sends."""

    closed = False
    last_sent_at = float("inf")

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: msgspec.Struct) -> None:
        self.said.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.FromWorker))

    def close(self) -> None:
        """A reward worker closes its channel in the processes that it forks."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.said if isinstance(one, kind)]


class TrainerPart:
    """A trainer worker in the process of the test."""

    def __init__(self, folder: RunDir) -> None:
        self.line = Line()
        channel: Any = self.line
        self.folder = folder
        self.process = TrainerWorker(start(folder, "trainer", "trainer.1"), channel, "127.0.0.1")
        self.trainer = self.process._trainer

    def __enter__(self) -> TrainerPart:
        return self

    def __exit__(self, *_: object) -> None:
        self.process._lock.close()

    def step(self, groups: tuple[m.SampledGroup, ...]) -> dict[str, float]:
        """One step as the supervisor asks for it; its metrics."""
        number = self.trainer.version
        self.process._handle(m.TrainGroups(step=number, attempt=0, groups=groups))
        self.process._handle(
            m.RunCommand(command=c.Apply(step=number, attempt=0, groups=tuple(one.id for one in groups)))
        )
        self.publish()
        figures: dict[str, float] = self.line.of(m.StepMetrics)[-1].metrics
        return figures

    def publish(self) -> None:
        self.process._handle(m.RunCommand(command=c.Publish(version=self.trainer.version, attempt=0)))

    def weights(self) -> dict[str, Any]:
        """What is published last."""
        with self.folder.store(self.folder.read()).lease(self.trainer.version) as lease:
            return {name: tensor.clone() for name, tensor in lease.tensors().items()}


class InstancePart:
    """A rollout instance that serves what the run's store has."""

    def __init__(self, folder: RunDir, version: int = 0) -> None:
        self.line = Line()
        channel: Any = self.line
        with mock.patch("os.nice"):  # the test's process is not to wait for all others
            self.instance = RolloutWorker(start(folder, "instance"), channel, LocalDataPlane())
        self.engine: Any = self.instance._engine
        self.load(version)

    def load(self, version: int) -> None:
        self.instance._handle(m.RunCommand(command=c.LoadVersion(slot=SlotId("i0.1", 0), version=version)))
        self.engine.wait_for_loads()

    def answer(self, submit: m.SubmitRequests) -> dict[int, list[int]]:
        """The tokens of each request, and their log-probs in `logprobs`."""
        self.instance._handle(submit)
        while self.engine.busy:
            self.instance._take(self.engine.step())
        self.instance._send(force=True)
        said: dict[int, list[int]] = {request.trajectory: [] for request in submit.requests}
        self.logprobs: dict[int, list[float]] = {number: [] for number in said}
        for report in self.line.of(m.RolloutReport):
            for chunk in report.chunks:
                said[chunk.trajectory] += chunk.tokens.tolist()
                self.logprobs[chunk.trajectory] += chunk.logprobs.tolist()
        self.ended = {one.trajectory: one.reason for report in self.line.of(m.RolloutReport) for one in report.ended}
        self.line.said.clear()
        return said


@dataclass(eq=False)
class Seat:
    """A worker without a process: keeps the messages that are sent to it."""

    role: str
    link: socket.socket
    channel: Channel[Any]
    node: str = ""
    pending: bool = False
    ended: bool = False
    heard: list[Any] = field(default_factory=list)

    def alive(self) -> bool:
        return not self.ended

    def failure(self) -> str:
        return ""

    def kill(self) -> None:
        self.ended = True
        self.channel.close()

    def listen(self, kind: type[Any]) -> list[Any]:
        """The messages of one kind that it has received so far."""
        self.heard += [] if self.ended else self.channel.receive()
        return [one for one in self.heard if isinstance(one, kind)]


class Seats:
    """A backend that starts no process."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}

    def start(self, role: str, worker_id: str, name: str) -> Seat:
        ours, theirs = socket.socketpair()
        self.seats[worker_id] = Seat(role, ours, Channel(theirs, m.ToWorker))  # type: ignore[arg-type]
        return self.seats[worker_id]

    def cores(self, node: str) -> int:
        return 8

    def capacity(self) -> int | None:
        return None

    def on_connect(self, wake: Any) -> None: ...

    def release(self, worker_id: str) -> None: ...

    def version_retired(self, version: int) -> None: ...

    def discard_kv(self, name: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Empty(Machine):
    """A machine on which no process is started."""

    seats: Seats

    def backend(self, run_dir: RunDir) -> Any:
        return self.seats


class SupervisorPart:
    """A supervisor over places at which nobody sits; the test says what processes would say."""

    def __init__(self, folder: RunDir) -> None:
        self.folder = folder
        self.backend = Seats()
        self.notices: list[str] = []
        self.commands: list[c.Command] = []
        """All that the orchestrator has asked for."""
        self.run = Run(folder, machine=Empty(seats=self.backend), notify=self.notices.append)
        backend: Any = self.backend
        self.run.supervisor.start(Scaling(folder, backend))

    @property
    def ledger(self) -> Ledger:
        return self.run._ledger

    def happen(self, *events: e.Event) -> None:
        """These happen, and all that follows from them at once."""
        world: Any = self.run.supervisor
        for event in events:
            world.emit(event)
        while world._events:
            event, now = world.next_event(None)
            commands = self.run.orchestrator.step(event, now)
            self.commands += commands
            world.execute(commands)

    def begin(self, **spec: Any) -> None:
        """The trainer is there with version 0, and all instances with that loaded."""
        room = {"slots": 1, "max_requests": 4, "kv_tokens": 10_000} | spec
        self.happen(e.TrainerReady(version=0))
        self.happen(e.Published(version=0, attempt=1, fingerprint="v0"))
        for place, seat in list(self.backend.seats.items()):
            if seat.role == "instance" and place != "evaluator":
                self.hear(place, m.RolloutReady(spec=InstanceSpec(instance=f"{place}.1", **room), kernels=""))
                self.happen(e.SlotLoaded(slot=SlotId(f"{place}.1", 0), version=0, fingerprint="v0"))

    def requests(self) -> list[Any]:
        return [request for submit in self.submits() for request in submit.requests]

    def process(self, worker_id: str) -> Any:
        """The supervisor's end of a place."""
        world: Any = self.run.supervisor
        return next(one for one in world._processes.workers if one.worker_id == worker_id)

    def hear(self, place: str, message: m.Message) -> None:
        """A process says something."""
        world: Any = self.run.supervisor
        world.receive(self.process(place), message)
        self.happen()

    def generated(self, submit: m.SubmitRequests, place: str = "i0") -> None:
        """An instance has generated these; they are to be judged."""
        for request in submit.requests:
            told: dict[str, Any] = {
                "trajectory": request.trajectory,
                "attempt": 0,
                "instance": f"{place}.1",
                "version": 0,
            }
            self.happen(e.Generated(**told, fingerprint="v0", tokens=1, kv_tokens=0))

    def finish(self, submit: m.SubmitRequests, place: str = "i0") -> None:
        """They are generated and judged."""
        self.generated(submit, place)
        for request in submit.requests:
            self.happen(e.Scored(trajectory=request.trajectory, reward=float(request.trajectory % 2)))

    def told(self, place: str, kind: type[Any]) -> list[Any]:
        return self.backend.seats[place].listen(kind)

    def submits(self) -> list[m.SubmitRequests]:
        """All requests to all instances."""
        places = [place for place, seat in self.backend.seats.items() if seat.role == "instance"]
        return [one for place in places for one in self.told(place, m.SubmitRequests)]

    def close(self) -> None:
        for seat in self.backend.seats.values():
            seat.kill()
        self.run.close()


@contextmanager
def supervisor(base: Path, *changes: dict[str, Any]) -> Iterator[SupervisorPart]:
    """A supervisor with these settings."""
    part = SupervisorPart(folder_of(base, *changes))
    try:
        yield part
    finally:
        part.close()


def publish(folder: RunDir) -> None:
    """The run's trainer publishes version 0."""
    with TrainerPart(folder) as trainer:
        trainer.publish()
