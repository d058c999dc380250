"""What processes say, into the books and to the orchestrator.

Invariant: tokens are in the books before the event that follows from them reaches the orchestrator.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError, RunError, UserError
from dora_rl.core.types import StepId, Version
from dora_rl.runtime.checkpoint_manifest import checkpoint_saved
from dora_rl.runtime.launch.process_manager import WorkerProcess
from dora_rl.runtime.supervisor.doing import Doing
from dora_rl.runtime.supervisor.mismatch import Mismatch
from dora_rl.runtime.supervisor.noting import Noting
from dora_rl.runtime.supervisor.parts import Parts
from dora_rl.runtime.transport import messages as m

Saved = Callable[[Version, str], None]


class Hearing:
    """The ears of a run."""

    def __init__(self, parts: Parts, doing: Doing, noting: Noting, saved: Saved) -> None:
        self._parts = parts
        self._doing = doing
        self._noting = noting
        self._saved = saved
        self._mismatch = Mismatch(parts.config, parts.notice)

    def take(self, process: WorkerProcess, message: m.FromWorker) -> None:
        """One message of a process."""
        parts = self._parts
        if isinstance(message, m.WorkerFailed):
            if message.by_user:
                raise UserError(message.reason)
            if message.final:
                raise RunError(
                    f"{message.reason}; the checkpoint before it is kept: begin a new run from that with a lower "
                    "trainer.optimiser.learning_rate, or mend what made these trajectories and resume the run"
                )
            process.reported_failure = message.reason
            parts.notice(f"{process.name}: {message.reason}")
        elif process.role == "reward":
            if isinstance(message, m.WorkerReady):
                parts.judges.ready(process)
            else:
                assert isinstance(message, m.ScoreResult | m.EnvResult)
                parts.judges.replied(process, message)
        elif parts.evaluation is not None and parts.evaluation.owns(process):
            parts.evaluation.hear(message, parts.judges)
        elif process.role == "trainer":
            self._from_trainer(message)
        elif process.role == "rank":
            assert isinstance(message, m.WorkerReady)
            parts.crew.rank_ready(process)
        else:
            self._from_instance(process, message)

    def _from_instance(self, process: WorkerProcess, message: m.FromWorker) -> None:
        parts = self._parts
        match message:
            case m.RolloutReady(spec=spec):
                parts.happen(e.InstanceJoined(spec=spec))
            case m.Report():
                self._report(process, message)
            case m.KvExported():
                if message.problem:
                    parts.notice(f"{process.name}: {message.problem}")
                else:
                    process.busy.difference_update(message.trajectories)
                self._doing.moves.exported(message)
            case m.KvImported():
                process.busy.update(message.arrived)
                parts.recorder.arrived(len(message.arrived))
                for problem in message.problems:
                    parts.notice(f"{process.name}: {problem}")
                self._doing.moves.imported(message)
            case m.NotParked(trajectory=trajectory, attempt=attempt):
                assert self._doing.turns is not None
                self._doing.turns.refused(trajectory, attempt, process.name)
            case m.SlotTime():
                parts.recorder.spent(process.name, message)
            case m.EngineStats(figures=figures):
                parts.recorder.counted[process.name] = figures
            case m.Heartbeat():
                pass  # hearing it was all
            case _:
                raise AssertionError(f"not from an instance: {message}")

    def _report(self, process: WorkerProcess, report: m.Report) -> None:
        parts = self._parts
        rows = []
        try:
            for said in report.said:
                row = parts.books.take(said)
                if row is not None:
                    rows.append(row)
        except IntegrityError as error:
            # What it says has a gap: what else it says is not to be trusted either.
            parts.ledger.append_tokens(rows, [])
            parts.lost(process, str(error))
            return
        ended = []
        for end in report.ended:
            process.busy.discard(end.trajectory)
            book = parts.books.find(end.trajectory)
            if book is not None and book.attempt == end.attempt and not book.failed:
                book.ended = end.reason
                ended.append((end.trajectory, end.reason))
        parts.ledger.append_tokens(rows, ended)
        for event in report.events:
            if isinstance(event, e.TrajectoryFailed):
                process.busy.discard(event.trajectory)
            if isinstance(event, e.Parked):
                assert self._doing.turns is not None
                self._doing.turns.parked(event)
            else:
                parts.happen(event)

    def _from_trainer(self, message: m.FromWorker) -> None:
        parts = self._parts
        match message:
            case m.Report(events=events):
                for event in events:
                    if isinstance(event, e.Accumulated):
                        parts.crew.training = max(0, parts.crew.training - event.groups)
                    elif isinstance(event, e.Trained):
                        parts.crew.training = 0
                    parts.happen(event)
                self._noting.label_trainer()
            case m.StepMetrics(step=step, metrics=metrics):
                self._stepped(step, metrics)
            case m.CheckpointWritten():
                self._checkpointed(message)
            case m.RanksAddress():
                parts.crew.meet(message)
            case m.SaveDone(version=version, path=path):
                self._saved(version, path)
            case _:
                raise AssertionError(f"not from the trainer: {message}")

    def _checkpointed(self, message: m.CheckpointWritten) -> None:
        """A checkpoint that was restored is noted only if it is not known: what is on disk later must not vouch for
        itself."""
        ledger = self._parts.ledger
        if message.restored and (message.name in ledger.checkpoints or not message.files):
            return
        ledger.record(checkpoint_saved(message.name, message.files, message.kept), self._parts.now())

    def _stepped(self, step: StepId, metrics: dict[str, float]) -> None:
        """A step is computed and not published yet: one whose log-probs can't be right never will be.

        A trainer that comes back tells its last step again, and may train steps again: those are recorded already.
        """
        if self._parts.newest is not None and step < self._parts.newest:
            return
        figures = metrics | self._mismatch.check(step, metrics)
        if figures.get("mismatch_alarm"):
            self._noting.alarmed(step, figures)
        self._mismatch.refuse(step, figures)
        self._noting.stepped(step, figures)
