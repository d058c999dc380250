"""The supervisor's side of the rollout workers: requests, weight loads, migrations, and how many instances there are.

    LoadVersion, UnloadSlot, SlotIdles, Abort  -> RunCommand
    StartGroup, Resume                         -> SubmitRequests
    Move                                       -> see `migrations`
    RolloutReady  -> InstanceJoined
    RolloutReport -> tokens into the trajectory store and the ledger, then the events that follow from them

Invariants:
- tokens are stored before the event that follows from them reaches the orchestrator;
- nothing is sent to an instance that is gone: the orchestrator learns of the loss, and every wait has a deadline;
- a name refers to one incarnation of an instance, or to none.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar, Protocol

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Attempt, InstanceId, SlotId, TrajectoryId
from dora_rl.engine.requests import Request
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.migrations import Migrations
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.supervisor.client import Hooks
    from dora_rl.runtime.supervisor.metrics import MetricsRecorder
    from dora_rl.runtime.supervisor.scaling import Scaling
    from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
    from dora_rl.runtime.tokenization import Tokenization


class Sessions(Protocol):
    """Multi-turn sessions, as far as rollout workers report to them."""

    def parked(self, event: e.Parked) -> None: ...

    def not_parked(self, trajectory: TrajectoryId, attempt: Attempt, instance: InstanceId) -> None: ...


class RolloutClient:
    """All rollout instances of a run."""

    commands: ClassVar[tuple[type[c.Command], ...]] = (
        c.LoadVersion,
        c.UnloadSlot,
        c.SlotIdles,
        c.StartGroup,
        c.Resume,
        c.Move,
        c.Abort,
        c.EvictInstance,
    )

    def __init__(
        self,
        config: RunConfig,
        hooks: Hooks,
        processes: ProcessManager,
        trajectories: TrajectoryStore,
        ledger: Ledger,
        metrics: MetricsRecorder,
        tokenization: Tokenization,
    ) -> None:
        self._hooks = hooks
        self._processes = processes
        self._trajectories = trajectories
        self._ledger = ledger
        self._metrics = metrics
        self._sampling = config.request_sampling(tokenization.stop_ids)
        self._replay_routing = config.trainer.moe.replay_routing
        self._tokenization = tokenization
        self._migrations = Migrations(self, hooks.emit, processes.backend.discard_kv)
        self.sessions: Sessions | None = None
        """Set where trajectories have several turns."""
        self.workers: list[WorkerProcess] = []
        """All instances that the run should have, in the order in which they were added; also those given up."""
        self._joined: dict[InstanceId, WorkerProcess] = {}
        """Instances that are up, by process name."""
        self._in_flight: dict[InstanceId, set[TrajectoryId]] = {}
        """Requests that were sent to an instance and have not left it."""
        self.load_changes = 0
        """Grows when an instance becomes busy or idle, joins or leaves."""

    # -- instances --------------------------------------------------------------------------------------------

    def owns(self, worker: WorkerProcess) -> bool:
        return worker in self.workers

    def busy(self, worker: WorkerProcess) -> bool:
        """Whether an instance has requests."""
        return bool(self._in_flight.get(worker.name))

    def send(self, instance: InstanceId, message: m.Message) -> bool:
        """Send to an instance; False if it is gone."""
        worker = self._joined.get(instance)
        if worker is not None:
            worker.send(message)
        return worker is not None

    def scale(self, scaling: Scaling) -> None:
        """Start or remove instances until there are as many as wanted."""
        wanted = scaling.wanted()
        while len(self.workers) < wanted:
            self._start_instance()
        while len(self.workers) > wanted:
            # An instance that was given up has no requests; among the others the one that was added last goes.
            leaving = next((worker for worker in self.workers if worker.given_up), self.workers[-1])
            self._remove_instance(leaving)

    def _start_instance(self) -> None:
        """Start an instance under the first free worker id."""
        taken = {worker.worker_id for worker in self.workers}
        worker_id = next(f"i{number}" for number in itertools.count() if f"i{number}" not in taken)
        self.workers.append(self._processes.start("instance", worker_id))
        self.load_changes += 1

    def _remove_instance(self, worker: WorkerProcess) -> None:
        """To the orchestrator the instance is lost, so its requests continue elsewhere from their tokens."""
        self.workers.remove(worker)
        name, reason = worker.name, "the run has fewer instances now"
        self._processes.remove(worker)
        self._metrics.mark("left", self._hooks.now(), who=name)
        self._hooks.notify(f"{name} leaves: {reason}")
        self._forget(name, reason)

    def lost(self, worker: WorkerProcess, reason: str, *, restarts: bool) -> None:  # noqa: ARG002
        self._forget(worker.name, reason)

    def _forget(self, instance: InstanceId, reason: str) -> None:
        self._joined.pop(instance, None)
        self._in_flight.pop(instance, None)
        self.load_changes += 1
        self._migrations.instance_lost(instance)
        self._hooks.emit(e.InstanceLost(instance=instance, reason=reason))

    # -- commands ---------------------------------------------------------------------------------------------

    def execute(self, command: c.Command) -> None:
        match command:
            case c.LoadVersion() | c.UnloadSlot() | c.SlotIdles():
                self.send(command.slot.instance, m.RunCommand(command=command))
            case c.StartGroup(group=group, slot=slot):
                self._submit(slot, tuple(map(self._request, self._trajectories.groups[group].trajectories)))
            case c.Resume(trajectory=trajectory, slot=slot):
                self.resume(trajectory, slot)
            case c.Move():
                self._migrations.start(command)
            case c.Abort(trajectory=trajectory, instance=instance):
                self.send(instance, m.RunCommand(command=command))
                self._left(instance, trajectory)
            case c.EvictInstance(instance=instance, reason=reason):
                worker = self._joined.get(instance)
                if worker is not None:
                    self._hooks.worker_lost(worker, reason)
            case _:
                raise AssertionError(f"not a command for rollout: {command}")

    def resume(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Continue a trajectory in a slot from its tokens so far."""
        entry = self._trajectories.trajectory(trajectory)
        if entry.ended is None:
            self._submit(slot, (self._request(trajectory),))
            return
        # The response is complete; only the report of its end was lost.
        version = entry.versions[-1]
        self._hooks.emit(
            e.Generated(
                trajectory=trajectory,
                attempt=entry.attempt,
                instance=slot.instance,
                version=version,
                fingerprint=self._trajectories.fingerprints[version],
                tokens=entry.length,
                kv_tokens=0,
            )
        )

    def _request(self, trajectory: TrajectoryId) -> Request:
        group = self._trajectories.group_of(trajectory)
        entry = group.trajectories[trajectory]
        return Request(
            trajectory=trajectory,
            attempt=entry.attempt,
            version=group.version,
            prompt=group.prompt,
            response=tuple(entry.response),
            turn_start=entry.turn_start,
            sampling=self._sampling,
            parks=self.sessions is not None,
            record_experts=self._replay_routing and self._tokenization.mixture,
        )

    def _submit(self, slot: SlotId, requests: tuple[Request, ...]) -> None:
        if self.send(slot.instance, m.SubmitRequests(slot=slot.number, requests=requests)):
            self._entered(slot.instance, *(request.trajectory for request in requests))

    # -- messages ---------------------------------------------------------------------------------------------

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        match message:
            case m.RolloutReady(spec=spec):
                self._joined[worker.name] = worker
                self._in_flight[worker.name] = set()
                self.load_changes += 1
                self._hooks.emit(e.InstanceJoined(spec=spec))
            case m.RolloutReport():
                self._report(worker, message)
            case m.KvExported():
                if message.problem:
                    self._hooks.notify(f"{worker.name}: {message.problem}")
                else:
                    self._left(worker.name, *message.trajectories)
                self._migrations.exported(message)
            case m.KvImported():
                self._entered(worker.name, *message.arrived)
                self._metrics.migrated(len(message.arrived))
                for problem in message.problems:
                    self._hooks.notify(f"{worker.name}: {problem}")
                self._migrations.imported(message)
            case m.NotParked(trajectory=trajectory, attempt=attempt):
                assert self.sessions is not None
                self.sessions.not_parked(trajectory, attempt, worker.name)
            case m.SlotTime():
                self._metrics.slot_time(worker.name, message)
            case m.EngineStats(figures=figures):
                self._metrics.engine_stats[worker.name] = figures
            case m.Heartbeat():
                pass  # receiving it was enough
            case _:
                raise AssertionError(f"not a message of a rollout worker: {message}")

    def _report(self, worker: WorkerProcess, report: m.RolloutReport) -> None:
        accepted: list[TokenChunk] = []
        try:
            accepted.extend(chunk for chunk in report.chunks if self._trajectories.append(chunk))
        except IntegrityError as error:
            # Its tokens have a gap, so nothing else that it reports can be trusted.
            self._ledger.append_tokens(accepted, [])
            self._hooks.worker_lost(worker, str(error))
            return
        ended = []
        for end in report.ended:
            self._left(worker.name, end.trajectory)
            entry = self._trajectories.find(end.trajectory)
            if entry is not None and entry.attempt == end.attempt and not entry.failed:
                entry.end(end.reason)
                ended.append((end.trajectory, end.reason))
        self._ledger.append_tokens(accepted, ended)
        for event in report.events:
            if isinstance(event, e.TrajectoryFailed):
                self._left(worker.name, event.trajectory)
            if isinstance(event, e.Parked):
                assert self.sessions is not None
                self.sessions.parked(event)
            else:
                self._hooks.emit(event)

    # -- requests in flight -----------------------------------------------------------------------------------

    def _entered(self, instance: InstanceId, *trajectories: TrajectoryId) -> None:
        requests = self._in_flight[instance]
        self.load_changes += not requests
        requests.update(trajectories)

    def _left(self, instance: InstanceId, *trajectories: TrajectoryId) -> None:
        requests = self._in_flight.get(instance)
        if requests:
            requests.difference_update(trajectories)
            self.load_changes += not requests
