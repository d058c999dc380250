"""The supervisor: the runtime that carries out the orchestrator's commands with worker processes.

    rollout workers --RolloutReport-->  supervisor  --TrainGroups-->  trainer
          ^------ SubmitRequests, RunCommand --'  ^------ ScoreResult ------ reward workers

It is a loop over role clients and the ledger:

    messages -> client.receive -> events -> orchestrator -> commands -> ledger, projections -> client.execute

What waits for what: a rollout worker waits for requests, the trainer for groups, a reward worker for responses, the
supervisor for any of them or for the orchestrator's next deadline. No process waits while it holds what another one
waits for.

Invariants:
- events reach the orchestrator one at a time, each logged with the commands that answered it;
- a command that can't be undone is started only when the event that led to it is durable (`_IRREVERSIBLE`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import RunError, UserError
from dora_rl.core.interfaces import Projection
from dora_rl.core.types import SECOND, Nanoseconds, Version
from dora_rl.orchestrator.bound_control import BoundControl
from dora_rl.orchestrator.config import Deadlines
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.provenance import BOUND, setting_changed
from dora_rl.runtime.supervisor.client import CommandExecutor, Hooks, WorkerClient
from dora_rl.runtime.supervisor.core_sharing import CoreSharing
from dora_rl.runtime.supervisor.env_sessions import EnvSessions, SessionLimits
from dora_rl.runtime.supervisor.failure_guard import FailureGuard
from dora_rl.runtime.supervisor.metrics import MetricsRecorder
from dora_rl.runtime.supervisor.retirement import Retirement
from dora_rl.runtime.supervisor.reward_client import RewardClient
from dora_rl.runtime.supervisor.rollout_client import RolloutClient
from dora_rl.runtime.supervisor.run_state import RunState
from dora_rl.runtime.supervisor.scaling import Scaling
from dora_rl.runtime.supervisor.trainer_client import TrainerClient
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.supervisor.best_policy import BestPolicy
    from dora_rl.runtime.supervisor.evaluation_client import EvaluationClient, EvaluationResult
    from dora_rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

_IRREVERSIBLE = (c.Apply, c.Retire)
_MAINTENANCE_SECONDS = 0.5
"""The longest time between two checks of deadlines and files, if nothing happens."""


class Supervisor:
    """Drives the workers of one run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        state: RunState,
        trajectories: TrajectoryStore,
        failures: FailureGuard,
        ledger: Ledger,
        store: WeightStore,
        processes: ProcessManager,
        metrics: MetricsRecorder,
        tokenization: Tokenization,
        origin: Nanoseconds,
        notify: Callable[[str], None],
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        self.stopping = False
        """Set from a signal handler: end, with everything kept."""
        self._config = config
        self._origin = origin
        self._clock = clock
        self._last: Nanoseconds = 0
        self._notify = notify
        self._state = state
        self._trajectories = trajectories
        self._failures = failures
        self._projections: Sequence[Projection] = (trajectories, state, failures)
        self._ledger = ledger
        self._processes = processes
        self._metrics = metrics
        hooks = Hooks(
            emit=self.emit,
            notify=notify,
            worker_lost=self.worker_lost,
            share_cores=lambda: self._cores.update(),
            now=self.now,
        )
        self.reward = RewardClient(config, hooks, processes, trajectories, tokenization)
        self.rollout = RolloutClient(config, hooks, processes, trajectories, ledger, metrics, tokenization)
        control = config.control
        self._bound_control = BoundControl(control, state.bound) if control.adaptive else None
        self.trainer = TrainerClient(
            config, hooks, processes, trajectories, state, ledger, metrics, bound_control=self._bound_control
        )
        self.sessions: EnvSessions | None = None
        if config.environment.kind is not None:
            self.sessions = self.rollout.sessions = EnvSessions(
                trajectories,
                tokenization,
                self.reward.pool,
                ledger,
                self.rollout,
                self.emit,
                session_limits(config),
                self.reward.emit_score,
            )
        self.evaluation: EvaluationClient | None = None
        self.best: BestPolicy | None = None
        self._retirement = Retirement(store, processes.backend)
        self._cores = CoreSharing(processes, self.rollout, self.trainer, overlap=config.control.mode_spec.overlaps)
        self._executors = self._routes()
        self._events: deque[e.Event] = deque()
        self._current: tuple[e.Event, Nanoseconds] | None = None
        self._deferred: deque[tuple[int, c.Command]] = deque()
        """Irreversible commands, each with the number of the event that has to be durable first."""
        self._bound = state.bound
        """The staleness bound that was recorded last."""
        self._scaling: Scaling | None = None
        self._maintained = 0.0
        self._ledger_error = ""

    def _routes(self) -> dict[type[c.Command], Callable[[c.Command], None]]:
        """Who carries out which command."""
        routes: dict[type[c.Command], Callable[[c.Command], None]] = {
            c.FetchPrompts: self._fetch_prompts,
            c.Retire: self._retire,
            c.Stalled: self._stalled,
            c.FailTrajectory: lambda _: None,  # the projections have counted it
            c.GroupFailed: lambda _: None,
            c.GroupWithoutSignal: lambda _: None,
        }
        executors: list[CommandExecutor] = [self.rollout, self.trainer, self.reward]
        if self.sessions is not None:
            executors.append(self.sessions)  # with an environment, some commands start there
        for executor in executors:
            routes |= dict.fromkeys(executor.commands, executor.execute)
        return routes

    # -- the runtime interface --------------------------------------------------------------------------------

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[e.Event, Nanoseconds] | None:
        """Wait for the next event."""
        while True:
            now = self.now()
            if self._events:
                return self._deliver(self._events.popleft(), now)
            started = self._current is not None  # before the first event there is no deadline either
            if self.stopping or (wake_at is None and started and self._finished()):
                return None
            if wake_at is not None and now >= wake_at:
                return self._deliver(e.Tick(), now)
            patience = _MAINTENANCE_SECONDS
            self._receive(patience if wake_at is None else min(patience, (wake_at - now) / SECOND))

    def execute(self, commands: Iterable[c.Command]) -> None:
        """Log the commands with the event that they answer, then start what they ask for."""
        assert self._current is not None
        event, at = self._current
        answered = list(commands)
        number = self._ledger.log(event, answered, at)
        for projection in self._projections:
            projection.apply(event, answered, at)
        if any(isinstance(command, c.GroupFailed) for command in answered):
            self._failures.check(self._state.newest)
        self._observe(event, at)
        bound = None if self._bound_control is None else self._bound_control.apply(event, answered, at)
        if bound is not None:
            self.emit(e.BoundChanged(max_staleness=bound))
        for command in answered:
            if isinstance(command, _IRREVERSIBLE):
                self._deferred.append((number, command))
                if isinstance(command, c.Apply):  # the trainer waits for it; nothing waits for a retirement
                    self._ledger.sync()
            else:
                self._executors[type(command)](command)
        self._cores.update()

    def now(self) -> Nanoseconds:
        """The run's clock; it never runs backwards."""
        self._last = max(self._last, self._clock() - self._origin)
        return self._last

    def _deliver(self, event: e.Event, now: Nanoseconds) -> tuple[e.Event, Nanoseconds]:
        self._current = (event, now)
        return self._current

    # -- starting and resuming --------------------------------------------------------------------------------

    def start(self, scaling: Scaling | None) -> None:
        """Start the workers; without a scaling, no instances."""
        self.trainer.start()
        self._scaling = scaling
        if scaling is not None:
            self.rollout.scale(scaling)

    def resume(self, events: Iterable[e.Event], commands: Iterable[c.Command]) -> None:
        """After a restart: queue what has happened meanwhile, and start what was asked for and not done."""
        self._events.extend(events)
        for command in commands:
            self._executors[type(command)](command)

    def instances_changed(self, before: int, after: int) -> None:
        """Record that the user asked for another number of instances."""
        self._ledger.record(setting_changed("rollout.instances", before, after), self.now())

    def evaluated(self, result: EvaluationResult) -> None:
        """Record the result of an evaluation."""
        self._metrics.evaluated(result, self.now())
        if self.best is not None:
            self.best.evaluated(result.version, result.accuracy)

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is requested and not complete."""
        return self.evaluation is not None and self.evaluation.pending > 0

    def evaluate_again(self, store: WeightStore, done: set[Version]) -> None:
        """After a restart: request the evaluations that have no result, before their weights are freed."""
        newest = self._state.newest
        if self.evaluation is not None and newest is not None:
            for version in store.versions():
                if version <= newest and version not in done:
                    self.evaluation.version_published(version)

    # -- the end ----------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        """The orchestrator has nothing left to decide: see the last evaluation and the last checkpoint through."""
        if self._deferred or self.evaluating:
            return False
        return self.trainer.finish()

    # -- events and commands that concern several clients -----------------------------------------------------

    def emit(self, event: e.Event) -> None:
        """Queue an event for the orchestrator."""
        self._events.append(event)

    def _observe(self, event: e.Event, at: Nanoseconds) -> None:
        match event:
            case e.TrainerLost():
                # The next trainer has none of the gradients that the lost one was to apply.
                self._deferred = deque(one for one in self._deferred if not isinstance(one[1], c.Apply))
                self.trainer.drop_outstanding()
            case e.BoundChanged(max_staleness=bound):
                self._ledger.record(setting_changed(BOUND, self._bound, bound), at)
                self._metrics.mark("bound", at, before=self._bound, after=bound)
                self._bound = bound
            case e.Published(version=version):
                failed = sum(self._trajectories.failed.values())
                self._metrics.published(
                    version,
                    at,
                    live=self._trajectories.live_versions,
                    failed=failed,
                    without_signal=self._trajectories.without_signal,
                    ledger_seconds=self._ledger.seconds,
                    bound=self._bound,
                )
                self._metrics.mark("published", at, version=version)
                if self.evaluation is not None:
                    self.evaluation.version_published(version)
            case e.Moved(trajectories=trajectories, source=source, target=target):
                count = len(trajectories)
                self._metrics.mark("moved", at, source=str(source), target=str(target), count=count)
                if self.sessions is not None:
                    self.sessions.moved(event)
            case _:
                pass

    def _fetch_prompts(self, command: c.Command) -> None:
        assert isinstance(command, c.FetchPrompts)
        self.emit(self._trajectories.fetch(command.count))

    def _retire(self, command: c.Command) -> None:
        assert isinstance(command, c.Retire)
        self._retirement.retire(command.version)

    def _stalled(self, command: c.Command) -> None:
        assert isinstance(command, c.Stalled)
        self._notify("the run makes no progress: " + "; ".join(command.waits))

    # -- waiting ----------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait for messages and handle them; carry out what has become durable or due."""
        due = self.reward.pool.next_due()
        if due is not None:
            seconds = min(seconds, due - time.monotonic())
        for worker, messages in self._processes.wait(seconds):
            for message in messages:
                if worker.channel is not None:  # the worker may have been given up meanwhile, with its messages
                    self.receive(worker, message)
            if worker.channel is not None and worker.channel.closed:
                self.worker_lost(worker, worker.reported_failure or "its process ended")
        self._release()
        for worker in self.reward.pool.overdue():
            self.worker_lost(worker, "it hung in a reward function or an environment", by_request=True)
        if time.monotonic() - self._maintained > _MAINTENANCE_SECONDS:
            self._maintain()
        self._cores.update()

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        """Handle one message of a worker."""
        if isinstance(message, m.WorkerFailed):
            self._worker_failed(worker, message)
        else:
            self._client(worker).receive(worker, message)

    def _client(self, worker: WorkerProcess) -> WorkerClient:
        clients: list[WorkerClient] = [self.rollout, self.trainer, self.reward]
        if self.evaluation is not None:
            clients.append(self.evaluation)
        return next(client for client in clients if client.owns(worker))

    def _release(self) -> None:
        """Start the irreversible commands whose events are durable."""
        if self._ledger.failure:
            raise RunError(self._ledger.failure)
        while self._deferred and self._deferred[0][0] <= self._ledger.durable:
            _, command = self._deferred.popleft()
            self._executors[type(command)](command)

    def _maintain(self) -> None:
        """What is done every half second."""
        self._maintained = time.monotonic()
        self._metrics.settle(self.now())
        self._metrics.flush()
        self._retirement.retry()
        if self._scaling is not None:
            self.rollout.scale(self._scaling)
        self._check_evaluator()
        for worker, reason in self._processes.unresponsive(self._deadlines.load, self._deadlines.heartbeat):
            if worker.handle is not None:  # ranks are lost together
                self.worker_lost(worker, reason)
        if self._ledger.write_error != self._ledger_error:
            self._ledger_error = self._ledger.write_error
            if self._ledger_error:
                self._notify(self._ledger_error)

    def _check_evaluator(self) -> None:
        """No run waits for an evaluation for ever."""
        patience = self._deadlines.load + self._deadlines.train  # an engine that does not come up is replaced first
        stuck = None if self.evaluation is None else self.evaluation.give_up_if_stuck(patience)
        if stuck is not None:
            name, reason = stuck
            self._metrics.mark("lost", self.now(), who=name, reason=reason)
            self._notify(f"{name} is given up: {reason}; the run continues without evaluations")

    @property
    def _deadlines(self) -> Deadlines:
        return self._config.control.deadlines

    # -- losses -----------------------------------------------------------------------------------------------

    def _worker_failed(self, worker: WorkerProcess, message: m.WorkerFailed) -> None:
        if message.by_user:
            raise UserError(message.reason)
        if message.final:
            raise RunError(
                f"{message.reason}; the checkpoint before it is kept: start a new run from that with a lower "
                "trainer.optimiser.learning_rate, or fix what made these trajectories and resume the run"
            )
        worker.report_failure(message.reason)
        self._notify(f"{worker.name}: {message.reason}")

    def worker_lost(self, worker: WorkerProcess, reason: str, *, by_request: bool = False) -> None:
        """A worker has ended, or has to be ended; `by_request` if user code that it ran was the cause."""
        if worker.role == "rank":
            trainer = self.trainer.worker
            trainer.report_failure(worker.reported_failure)
            worker, reason = trainer, f"{worker.name}: {reason}"
        name = worker.name
        if worker.role == "reward":
            by_request = by_request or self.reward.pool.handling(worker)
        restarts = self._processes.lost(worker, reason, by_request=by_request)
        logger.warning("%s is lost: %s", name, reason)
        self._metrics.mark("lost", self.now(), who=name, reason=reason)
        outcome = "it is restarted" if restarts else "it is given up after too many failures"
        self._notify(f"{name} is lost: {reason}; {outcome}")
        self._client(worker).lost(worker, reason, restarts=restarts)
        if not restarts:
            self._continue_without(worker)

    def _continue_without(self, worker: WorkerProcess) -> None:
        left = [one for one in self._processes.workers if one.role == worker.role and not one.given_up]
        if self.evaluation is not None:
            left = [one for one in left if not self.evaluation.owns(one)]
        if not left:
            raise RunError(
                f"no {worker.role} worker is left: {worker.worker_id} failed {worker.failures} times in a row, last "
                f"with: {worker.last_failure}; see {worker.worker_id}.log in the run's logs, then resume the run"
            )
        if worker.role != "trainer":
            self._notify(f"the run continues with {len(left)} {worker.role}{'s' if len(left) > 1 else ''}")


def session_limits(config: RunConfig) -> SessionLimits:
    """The limits of multi-turn trajectories."""
    return SessionLimits(
        config.control.max_response_tokens, config.rollout.engine.max_context, config.environment.timeout_seconds
    )
