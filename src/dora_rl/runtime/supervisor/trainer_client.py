"""The supervisor's side of the trainer: rank 0, which receives and reports, and the other ranks.

    Accumulate     -> TrainGroups            TrainerReport     -> Accumulated, Trained, Published, Checkpointed
    Apply, Publish -> RunCommand             StepMetrics       -> metrics, adaptive bound; wrong log-probs end the run
    (end of run)   -> SaveCheckpoint         CheckpointWritten -> the ledger
                                             SaveDone          -> the run may end
    RanksAddress of rank 0 -> JoinRanks to the other ranks

Invariants:
- the ranks start and end together;
- `outstanding` counts the groups and the optimiser step that the trainer was sent and has not reported back.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity
from dora_rl.core.types import StepId
from dora_rl.runtime.checkpoint_manifest import checkpoint_saved
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.mismatch import Mismatch
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.orchestrator.bound_control import BoundControl
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.supervisor.best_policy import BestPolicy
    from dora_rl.runtime.supervisor.client import Hooks
    from dora_rl.runtime.supervisor.metrics import MetricsRecorder
    from dora_rl.runtime.supervisor.run_state import RunState
    from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore


class TrainerClient:
    """The trainer of a run."""

    commands: ClassVar[tuple[type[c.Command], ...]] = (
        c.Accumulate,
        c.Apply,
        c.Publish,
        c.RestartTrainer,
        c.TrainerIdles,
    )

    def __init__(
        self,
        config: RunConfig,
        hooks: Hooks,
        processes: ProcessManager,
        trajectories: TrajectoryStore,
        state: RunState,
        ledger: Ledger,
        metrics: MetricsRecorder,
        *,
        bound_control: BoundControl | None = None,
    ) -> None:
        self._config = config
        self._hooks = hooks
        self._processes = processes
        self._trajectories = trajectories
        self._state = state
        self._ledger = ledger
        self._metrics = metrics
        self._bound_control = bound_control
        self.best: BestPolicy | None = None
        self._mismatch = Mismatch(config, hooks.notify)
        self._worker: WorkerProcess | None = None
        self.ranks: list[WorkerProcess] = []
        """The trainer processes besides rank 0."""
        self._address: m.JoinRanks | None = None
        self.outstanding = 0
        self.load_changes = 0
        """Grows when the trainer becomes busy or idle."""
        self._saving_since: float | None = None
        """When the last checkpoint of the run was asked for."""
        self._saved = False

    @property
    def worker(self) -> WorkerProcess:
        """Rank 0."""
        assert self._worker is not None, "the trainer is started before anything is sent to it"
        return self._worker

    @property
    def started(self) -> bool:
        return self._worker is not None

    @property
    def busy(self) -> bool:
        return self.outstanding > 0

    def start(self) -> None:
        """Start all ranks."""
        ranks = self._config.trainer.ranks
        self._worker = self._processes.start("trainer", "trainer", ranks=ranks)
        for rank in range(1, ranks):
            self.ranks.append(self._processes.start("rank", f"rank{rank}", rank=rank, ranks=ranks))

    def owns(self, worker: WorkerProcess) -> bool:
        return worker is self._worker or worker in self.ranks

    def lost(self, worker: WorkerProcess, reason: str, *, restarts: bool) -> None:  # noqa: ARG002
        """The ranks train together, so the loss of one is the loss of all."""
        self._saving_since = None
        self._address = None
        self.drop_outstanding()
        for rank in self.ranks:
            self._processes.restart_with(self.worker, rank)
        self._hooks.emit(e.TrainerLost(reason=reason))

    def drop_outstanding(self) -> None:
        """A trainer that is lost will not report back, nor will the next one what this one was sent."""
        self._set_outstanding(0)

    # -- commands ---------------------------------------------------------------------------------------------

    def execute(self, command: c.Command) -> None:
        match command:
            case c.Accumulate(step=step, attempt=attempt):
                groups = tuple(self._trajectories.for_training(group) for group in command.groups)
                self._set_outstanding(self.outstanding + len(groups))
                self._label_time()
                self._hooks.share_cores()  # before the groups: the trainer changes its threads only between messages
                self.worker.send(m.TrainGroups(step=step, attempt=attempt, groups=groups))
            case c.Apply():
                self._set_outstanding(self.outstanding + 1)
                self._label_time()
                self.worker.send(m.RunCommand(command=command))
            case c.Publish(version=version):
                self._metrics.trainer_time.switch(self._hooks.now(), Activity(ActivityLabel.PUBLISH, version))
                self.worker.send(m.RunCommand(command=command))
            case c.RestartTrainer(reason=reason):
                self._hooks.worker_lost(self.worker, reason)
            case c.TrainerIdles(cause=cause):
                if not self.busy:
                    self._label_time(cause)
            case _:
                raise AssertionError(f"not a command for the trainer: {command}")

    def finish(self) -> bool:
        """Have the last version saved; True once it is a checkpoint."""
        worker = self.worker
        if worker.channel is None or worker.last_message_at is None:
            return False  # the trainer is not up yet; starting has a deadline of its own
        if self._saving_since is None:
            self._saving_since = time.monotonic()
            worker.send(m.SaveCheckpoint())
        elif not self._saved and time.monotonic() > self._saving_since + self._config.control.deadlines.train:
            self._hooks.worker_lost(worker, "saving took longer than deadlines.train")
        return self._saved

    # -- messages ---------------------------------------------------------------------------------------------

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        match message:
            case m.WorkerReady():
                if self._address is not None:
                    worker.send(self._address)
            case m.RanksAddress(address=address, port=port):
                self._address = m.JoinRanks(address=address, port=port)
                for rank in self.ranks:
                    if rank.last_message_at is not None:
                        rank.send(self._address)
            case m.TrainerReport(events=events):
                for event in events:
                    self._receive_event(event)
                self._label_time()
            case m.StepMetrics(step=step, metrics=metrics):
                self._step_metrics(step, metrics)
            case m.CheckpointWritten():
                self._checkpoint_written(message)
            case m.SaveDone(version=version):
                if version == self._state.newest:
                    self._saved = True
                else:
                    self._saving_since = None  # it restarted from an older checkpoint and is still catching up
            case m.Heartbeat():
                pass  # receiving it was enough
            case _:
                raise AssertionError(f"not a message of the trainer: {message}")

    def _receive_event(self, event: e.Event) -> None:
        if isinstance(event, e.Accumulated):
            self._set_outstanding(max(0, self.outstanding - event.groups))
        elif isinstance(event, e.Trained):
            self._set_outstanding(0)
        self._hooks.emit(event)

    def _checkpoint_written(self, message: m.CheckpointWritten) -> None:
        """A restored checkpoint is recorded only if it is unknown: files on disk must not vouch for themselves."""
        if self.best is not None:
            self.best.checkpoint_written(message.name)
        if message.restored and (message.name in self._ledger.checkpoints or not message.files):
            return
        self._ledger.record(checkpoint_saved(message.name, message.files, message.kept), self._hooks.now())
        self._metrics.checkpointed(message.name)

    def _step_metrics(self, step: StepId, metrics: dict[str, float]) -> None:
        """The step is computed and not published yet; if its log-probs can't be right it never will be.

        A restarted trainer reports its last step again, and may train steps again: those are recorded already.
        """
        if self._state.newest is not None and step < self._state.newest:
            return
        figures = metrics | self._mismatch.check(step, metrics)
        if level := figures.get("mismatch_alarm"):
            gap = figures["mismatch_gap"]
            self._metrics.mark("mismatch", self._hooks.now(), step=step, gap=gap, stopped=level == 2.0)
        self._mismatch.refuse(step, figures)
        self._metrics.step_trained(step, figures, self._trajectories.of_step(step))
        if self._bound_control is not None:
            self._bound_control.learned(step, figures.get("off_policy/ess"), figures.get("off_policy/kl"))

    def _set_outstanding(self, outstanding: int) -> None:
        self.load_changes += bool(outstanding) != self.busy
        self.outstanding = outstanding

    def _label_time(self, cause: IdleCause | None = None) -> None:
        """Account for what the trainer does from now on."""
        account, newest = self._metrics.trainer_time, self._state.newest
        if self.busy:
            account.switch(self._hooks.now(), Activity(ActivityLabel.TRAIN, newest))
        elif account.current.label is not ActivityLabel.IDLE or cause is not None:
            idle = cause or IdleCause(reason=IdleReason.ROLLOUT)
            account.switch(self._hooks.now(), Activity(ActivityLabel.IDLE, newest, idle))
