"""Test harnesses that run the supervisor, trainer or rollout worker of a run inside the test process.

Settings reach each of them as they do in a run: through the config file, the run directory and the `StartWorker`
message. A harness passes a worker the messages that the supervisor would send, and records the messages that it sends.
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
    """Return the settings of the small test job with the given changes merged into them."""
    tree = settings(base)
    for change in changes:
        tree = merged(tree, change)
    return tree


def at(path: str, value: Any) -> dict[str, Any]:
    """Return a nested dictionary that sets one dotted key."""
    for part in reversed(path.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


def folder_of(base: Path, *changes: dict[str, Any]) -> RunDir:
    """Create the run directory of a run that has not started."""
    return make_run(base, f"settings-{os.getpid()}-{next(_NUMBERS)}", tree_with(base, *changes))


def start(folder: RunDir, role: str, name: str = "i0.1") -> m.StartWorker:
    """Return the first message that the supervisor sends to a worker, encoded and decoded once."""
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


class RecordingChannel:
    """A replacement for a worker's channel that records the messages sent through it."""

    closed = False
    last_sent_at = float("inf")

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.FromWorker))

    def close(self) -> None:
        """A reward worker closes its channel in the processes that it forks."""

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


class TrainerHarness:
    """A trainer worker inside the test process."""

    def __init__(self, folder: RunDir) -> None:
        self.channel = RecordingChannel()
        channel: Any = self.channel
        self.folder = folder
        self.process = TrainerWorker(start(folder, "trainer", "trainer.1"), channel, "127.0.0.1")
        self.trainer = self.process._trainer

    def __enter__(self) -> TrainerHarness:
        return self

    def __exit__(self, *_: object) -> None:
        self.process._lock.close()

    def step(self, groups: tuple[m.SampledGroup, ...]) -> dict[str, float]:
        """Run one training step with the supervisor's messages and return its metrics."""
        number = self.trainer.version
        self.process._handle(m.TrainGroups(step=number, attempt=0, groups=groups))
        self.process._handle(
            m.RunCommand(command=c.Apply(step=number, attempt=0, groups=tuple(one.id for one in groups)))
        )
        self.publish()
        metrics: dict[str, float] = self.channel.of(m.StepMetrics)[-1].metrics
        return metrics

    def publish(self) -> None:
        self.process._handle(m.RunCommand(command=c.Publish(version=self.trainer.version, attempt=0)))

    def weights(self) -> dict[str, Any]:
        """Return the weights that were published last."""
        with self.folder.store(self.folder.read()).lease(self.trainer.version) as lease:
            return {name: tensor.clone() for name, tensor in lease.tensors().items()}


class InstanceHarness:
    """A rollout worker inside the test process that serves weights from the run's weight store."""

    def __init__(self, folder: RunDir, version: int = 0) -> None:
        self.channel = RecordingChannel()
        channel: Any = self.channel
        with mock.patch("os.nice"):  # do not lower the priority of the test process
            self.instance = RolloutWorker(start(folder, "instance"), channel, LocalDataPlane())
        self.engine: Any = self.instance._engine
        self.load(version)

    def load(self, version: int) -> None:
        self.instance._handle(m.RunCommand(command=c.LoadVersion(slot=SlotId("i0.1", 0), version=version)))
        self.engine.wait_for_loads()

    def answer(self, submit: m.SubmitRequests) -> dict[int, list[int]]:
        """Return the tokens generated for each request; their log-probs are in `logprobs`."""
        self.instance._handle(submit)
        while self.engine.busy:
            self.instance._take(self.engine.step())
        self.instance._send(force=True)
        tokens: dict[int, list[int]] = {request.trajectory: [] for request in submit.requests}
        self.logprobs: dict[int, list[float]] = {number: [] for number in tokens}
        for report in self.channel.of(m.RolloutReport):
            for chunk in report.chunks:
                tokens[chunk.trajectory] += chunk.tokens.tolist()
                self.logprobs[chunk.trajectory] += chunk.logprobs.tolist()
        self.ended = {one.trajectory: one.reason for report in self.channel.of(m.RolloutReport) for one in report.ended}
        self.channel.sent.clear()
        return tokens


@dataclass(eq=False)
class FakeWorker:
    """A worker without a process that records the messages sent to it."""

    role: str
    link: socket.socket
    channel: Channel[Any]
    node: str = ""
    pending: bool = False
    ended: bool = False
    received: list[Any] = field(default_factory=list)

    def alive(self) -> bool:
        return not self.ended

    def failure(self) -> str:
        return ""

    def kill(self) -> None:
        self.ended = True
        self.channel.close()

    def messages(self, kind: type[Any]) -> list[Any]:
        """Return the messages of one type that were received so far."""
        self.received += [] if self.ended else self.channel.receive()
        return [one for one in self.received if isinstance(one, kind)]


class FakeBackend:
    """A backend that starts no processes."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeWorker] = {}

    def start(self, role: str, worker_id: str, name: str) -> FakeWorker:
        ours, theirs = socket.socketpair()
        self.workers[worker_id] = FakeWorker(role, ours, Channel(theirs, m.ToWorker))  # type: ignore[arg-type]
        return self.workers[worker_id]

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
class FakeMachine(Machine):
    """A machine whose backend starts no processes."""

    fake_backend: FakeBackend

    def backend(self, run_dir: RunDir) -> Any:
        return self.fake_backend


class SupervisorHarness:
    """A supervisor without worker processes; the test supplies the messages that workers would send."""

    def __init__(self, folder: RunDir) -> None:
        self.folder = folder
        self.backend = FakeBackend()
        self.notices: list[str] = []
        self.commands: list[c.Command] = []
        """All commands that the orchestrator has issued."""
        self.run = Run(folder, machine=FakeMachine(fake_backend=self.backend), notify=self.notices.append)
        backend: Any = self.backend
        self.run.supervisor.start(Scaling(folder, backend))

    @property
    def ledger(self) -> Ledger:
        return self.run._ledger

    def happen(self, *events: e.Event) -> None:
        """Process the given events and all events that follow from them immediately."""
        supervisor: Any = self.run.supervisor
        for event in events:
            supervisor.emit(event)
        while supervisor._events:
            event, now = supervisor.next_event(None)
            commands = self.run.orchestrator.step(event, now)
            self.commands += commands
            supervisor.execute(commands)

    def begin(self, **spec: Any) -> None:
        """Report that the trainer has published version 0 and that all instances have loaded it."""
        room = {"slots": 1, "max_requests": 4, "kv_tokens": 10_000} | spec
        self.happen(e.TrainerReady(version=0))
        self.happen(e.Published(version=0, attempt=1, fingerprint="v0"))
        for worker_id, worker in list(self.backend.workers.items()):
            if worker.role == "instance" and worker_id != "evaluator":
                self.receive(
                    worker_id, m.RolloutReady(spec=InstanceSpec(instance=f"{worker_id}.1", **room), kernels="")
                )
                self.happen(e.SlotLoaded(slot=SlotId(f"{worker_id}.1", 0), version=0, fingerprint="v0"))

    def requests(self) -> list[Any]:
        return [request for submit in self.submits() for request in submit.requests]

    def process(self, worker_id: str) -> Any:
        """Return the supervisor's record of a worker."""
        supervisor: Any = self.run.supervisor
        return next(one for one in supervisor._processes.workers if one.worker_id == worker_id)

    def receive(self, worker_id: str, message: m.Message) -> None:
        """Pass the supervisor a message as if the worker had sent it."""
        supervisor: Any = self.run.supervisor
        supervisor.receive(self.process(worker_id), message)
        self.happen()

    def generated(self, submit: m.SubmitRequests, worker_id: str = "i0") -> None:
        """Report that an instance has generated these requests, which then wait to be scored."""
        for request in submit.requests:
            fields: dict[str, Any] = {
                "trajectory": request.trajectory,
                "attempt": 0,
                "instance": f"{worker_id}.1",
                "version": 0,
            }
            self.happen(e.Generated(**fields, fingerprint="v0", tokens=1, kv_tokens=0))

    def finish(self, submit: m.SubmitRequests, worker_id: str = "i0") -> None:
        """Report that these requests are generated and scored."""
        self.generated(submit, worker_id)
        for request in submit.requests:
            self.happen(e.Scored(trajectory=request.trajectory, reward=float(request.trajectory % 2)))

    def sent_to(self, worker_id: str, kind: type[Any]) -> list[Any]:
        """Return the messages of one type that the supervisor has sent to a worker."""
        return self.backend.workers[worker_id].messages(kind)

    def submits(self) -> list[m.SubmitRequests]:
        """Return the submissions sent to all instances."""
        worker_ids = [worker_id for worker_id, worker in self.backend.workers.items() if worker.role == "instance"]
        return [one for worker_id in worker_ids for one in self.sent_to(worker_id, m.SubmitRequests)]

    def close(self) -> None:
        for worker in self.backend.workers.values():
            worker.kill()
        self.run.close()


@contextmanager
def supervisor(base: Path, *changes: dict[str, Any]) -> Iterator[SupervisorHarness]:
    """Provide a supervisor with the given changes to its settings."""
    harness = SupervisorHarness(folder_of(base, *changes))
    try:
        yield harness
    finally:
        harness.close()


def publish(folder: RunDir) -> None:
    """Publish version 0 with the run's trainer."""
    with TrainerHarness(folder) as trainer:
        trainer.publish()
