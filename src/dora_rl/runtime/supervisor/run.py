"""A run from start to end, or from where it was interrupted: wires the components together and drives the orchestrator.

How a run is resumed is described in `recovery`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import UserError
from dora_rl.core.interfaces import drive
from dora_rl.core.types import Nanoseconds
from dora_rl.engine.kv_transfer.shared_memory import sweep
from dora_rl.envs.data import Dataset, load
from dora_rl.ledger.ledger import Ledger
from dora_rl.models.loading import load_tokenizer
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime import logs
from dora_rl.runtime.launch.machine import Machine
from dora_rl.runtime.launch.process_manager import ProcessManager
from dora_rl.runtime.provenance import Provenance
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.best_policy import BestPolicy
from dora_rl.runtime.supervisor.evaluation_client import EvaluationClient
from dora_rl.runtime.supervisor.evaluation_sessions import EvaluationSessions
from dora_rl.runtime.supervisor.failure_guard import FailureGuard
from dora_rl.runtime.supervisor.held_out import held_out_accuracy, held_out_problems
from dora_rl.runtime.supervisor.metrics import MetricsRecorder
from dora_rl.runtime.supervisor.prompt_source import PromptSource
from dora_rl.runtime.supervisor.recovery import check_extension, recover
from dora_rl.runtime.supervisor.run_state import RunState
from dora_rl.runtime.supervisor.scaling import Scaling
from dora_rl.runtime.supervisor.supervisor import Supervisor, session_limits
from dora_rl.runtime.supervisor.trackers import trackers
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.trainer import checkpoint

if TYPE_CHECKING:
    from dora_rl.runtime.preflight import Prepared

_LOCK_SECONDS = 1.0
"""How long a supervisor that was killed may keep the lock of its run."""
_STOP_SECONDS = 5.0
"""How long processes have to exit by themselves."""
_RESTARTED = "the supervisor was restarted"


class Run:
    """One run, in this process and those that it starts."""

    def __init__(
        self,
        run_dir: RunDir,
        *,
        notify: Callable[[str], None] = lambda _: None,
        machine: Machine = Machine(),  # noqa: B008
        bound: int | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        """`bound` is another staleness bound than the run had so far; `prepared` is what the preflight has loaded."""
        self.run_dir = run_dir
        self._prepared = prepared
        self._bound = bound
        self.config = run_dir.read()
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock(run_dir))
            self._backend = machine.backend(run_dir)
            undo.callback(self._backend.close)
            logs.configure(self.config.logging.level, run_dir.logs / "supervisor.log")
            undo.callback(logs.close)
            self._wire(notify, machine, undo)
            undo.pop_all()

    def _wire(self, notify: Callable[[str], None], machine: Machine, undo: contextlib.ExitStack) -> None:
        run_dir, config, prepared = self.run_dir, self.config, self._prepared
        control = config.control
        if prepared is None:
            self.tokenization = Tokenization(load_tokenizer(config.model), config)
            self.dataset: Dataset = load(config.data, run_dir.base())
        else:
            self.tokenization, self.dataset = prepared.tokenization, prepared.dataset
        self._processes: ProcessManager | None = None
        self._ledger = Ledger(
            run_dir.ledger,
            control.group_size,
            mirror=run_dir.events,
            notify=self._wake,
            open_connection=machine.connect,
        )
        undo.callback(self._ledger.close)
        self._provenance = Provenance(run_dir, config, self._ledger, notify)
        self._provenance.check()

        self.orchestrator = Orchestrator(control.model_copy(update={"steps": self._provenance.first_steps}))
        trajectories = TrajectoryStore(PromptSource(self.dataset), self.tokenization.encode, control.group_size)
        state = self._state = RunState(control.staleness, self._provenance.first_steps)
        failures = FailureGuard(control, trajectories)
        projections = (trajectories, state, failures)
        recover(run_dir, config, self.orchestrator, self._ledger, projections, trajectories, state)
        failures.reset()
        self._extended = control.steps != state.steps
        if self._extended:
            check_extension(run_dir, config, self.orchestrator, state)

        origin = machine.clock() - state.at
        self._processes = ProcessManager(run_dir, config, self._backend, origin, state.incarnations)
        self._store = run_dir.store(config)
        self.metrics = MetricsRecorder(
            run_dir,
            trackers(run_dir, config),
            state.at,
            decode=self.tokenization.decode,
            samples=config.logging.samples,
            completions_every=config.logging.completions_every,
        )
        self.supervisor = Supervisor(
            config,
            state=state,
            trajectories=trajectories,
            failures=failures,
            ledger=self._ledger,
            store=self._store,
            processes=self._processes,
            metrics=self.metrics,
            tokenization=self.tokenization,
            origin=origin,
            notify=notify,
            clock=machine.clock,
        )
        if config.evaluation.every:
            evaluation = self.supervisor.evaluation = self._evaluation(self._processes)
            best = BestPolicy(run_dir.checkpoints, evaluation.is_due, held_out_accuracy(run_dir.metrics))
            self.supervisor.best = self.supervisor.trainer.best = best
        self._provenance.record(state.at)

    def run(self, on_event: Callable[[], None] = lambda: None) -> None:
        """Run until nothing is left to do, or the supervisor is stopped; `on_event` is called after each event."""
        try:
            steps = self.config.control.steps
            changed: list[e.Event] = []
            if self._extended and steps is not None:
                changed.append(e.StepsChanged(steps=steps))
            if self._state.at:
                self.supervisor.evaluate_again(self._store, set(held_out_accuracy(self.run_dir.metrics)))
                changed += [] if self._bound is None else [e.BoundChanged(max_staleness=self._bound)]
                self.supervisor.resume([*self._state.losses(_RESTARTED), *changed], [*self._state.open_commands()])
            else:
                self.supervisor.resume(changed, [])
            finished = self.orchestrator.finished and not self._extended
            if not finished or not self._saved() or self.supervisor.evaluating:
                self.supervisor.start(
                    None if finished else Scaling(self.run_dir, self._backend, self.supervisor.instances_changed)
                )
                drive(_Observed(self.orchestrator, on_event), self.supervisor)
        finally:
            self.close()

    def close(self) -> None:
        """End all processes; what is finished is kept."""
        assert self._processes is not None
        self._processes.stop(patience=_STOP_SECONDS)
        sweep()  # shared memory that instances left behind when they were killed
        self._provenance.look_again(self.supervisor.now())
        self._ledger.close()
        self.metrics.settle(self.supervisor.now())
        self.metrics.close()
        self._lock.close()
        logs.close()
        if self.orchestrator.finished and self.config.weights == "memory" and not self.supervisor.evaluating:
            self.run_dir.store(self.config).clear()

    def _saved(self) -> bool:
        """Whether the last version is a checkpoint."""
        return self.orchestrator.newest in checkpoint.versions(self.run_dir.checkpoints)

    def _evaluation(self, processes: ProcessManager) -> EvaluationClient:
        settings, prepared, tokenization = self.config.evaluation, self._prepared, self.tokenization
        held_out = None if prepared is None else prepared.held_out
        if held_out is None:
            held_out = held_out_problems(self.config, self.run_dir.base(), self.dataset)
        sessions = None
        if self.config.environment.kind is not None:
            # Held-out prompts are played through the environment as those of training are.
            sessions = functools.partial(
                EvaluationSessions,
                tokenization=tokenization,
                pool=self.supervisor.reward.pool,
                limits=session_limits(self.config),
                max_requests=self.config.rollout.engine.max_requests,
            )
        return EvaluationClient(
            [(problem, tokenization.encode(problem)) for problem in held_out],
            self.config.request_sampling(tokenization.stop_ids, temperature=settings.temperature),
            every=settings.every,
            last=self.config.control.steps,
            samples=settings.samples,
            threshold=settings.success_threshold,
            store=self._store,
            processes=processes,
            score=self.supervisor.reward.score,
            on_result=self.supervisor.evaluated,
            sessions=sessions,
        )

    def _wake(self) -> None:
        if self._processes is not None:
            self._processes.wake()


class _Observed:
    """The orchestrator, with a callback after each event."""

    def __init__(self, orchestrator: Orchestrator, on_event: Callable[[], None]) -> None:
        self._orchestrator = orchestrator
        self._on_event = on_event

    def step(self, event: e.Event, now: Nanoseconds) -> list[c.Command]:
        commands = self._orchestrator.step(event, now)
        self._on_event()
        return commands

    def wake_at(self) -> Nanoseconds | None:
        return self._orchestrator.wake_at()


def _lock(run_dir: RunDir) -> Any:
    """Allow one supervisor at a time."""
    file = run_dir.lock.open("w")
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise UserError(f"the run {run_dir.path} is already running in another process") from None
            time.sleep(0.02)
        else:
            return file
