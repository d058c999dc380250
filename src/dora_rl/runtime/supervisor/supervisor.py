"""The world of a run: processes, of one machine or of many, behind the orchestrator's commands.

    instances --tokens, events-->  supervisor  --groups-->  trainer
        ^------ requests, moves ------'  ^------ verdicts ------ judges

Who waits for whom: an instance waits for requests; the trainer for groups; a judge for questions; the supervisor for
any of them, or for the orchestrator's next deadline. Nobody waits while holding what another waits for.

    hearing   what processes say        doing    commands as messages
    crew      who fills which place     noting   what is written down for people

Invariants:
- events reach the orchestrator one at a time, each written down with the commands that answered it;
- what can't be undone is begun only when the event that asked for it is durable (`_DURABLE`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import RunError
from dora_rl.core.types import SECOND, Nanoseconds, Version
from dora_rl.orchestrator.config import Deadlines
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.provenance import BOUND, setting_changed
from dora_rl.runtime.supervisor.crew import Crew
from dora_rl.runtime.supervisor.doing import Doing
from dora_rl.runtime.supervisor.failure_guard import FailureGuard
from dora_rl.runtime.supervisor.hearing import Hearing
from dora_rl.runtime.supervisor.metrics_recorder import MetricsRecorder
from dora_rl.runtime.supervisor.noting import Noting
from dora_rl.runtime.supervisor.parts import Parts
from dora_rl.runtime.supervisor.reward_client import RewardClient
from dora_rl.runtime.supervisor.scaling import Scaling
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.supervisor.evaluation import Evaluated, Evaluation
    from dora_rl.weights.store import WeightStore

_DURABLE = (c.Apply, c.Retire)
_LOOK = 0.5
"""Seconds between two looks at deadlines and files, if nothing happens."""


class Supervisor:
    """Carries out commands with processes."""

    def __init__(
        self,
        config: RunConfig,
        books: TrajectoryStore,
        ledger: Ledger,
        store: WeightStore,
        processes: ProcessManager,
        recorder: MetricsRecorder,
        text: Tokenization,
        origin: Nanoseconds,
        notice: Callable[[str], None],
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        self.stopping = False
        """Set from a signal handler: end, with everything kept."""
        self._origin = origin
        self._clock = clock
        concurrency = config.reward.concurrency if config.environment.kind is None else config.environment.concurrency
        self._parts = Parts(
            config=config,
            books=books,
            ledger=ledger,
            store=store,
            recorder=recorder,
            text=text,
            processes=processes,
            crew=Crew(processes, overlap=config.control.mode_spec.overlaps),
            judges=RewardClient(processes, config.reward.workers, concurrency),
            notice=notice,
            happen=self._happen,
            lost=self._lost,
            now=self.now,
        )
        self._noting = Noting(self._parts)
        self._doing = Doing(self._parts, self._noting)
        self._hearing = Hearing(self._parts, self._doing, self._noting, self._saved)
        self._events: deque[e.Event] = deque()
        self._verdicts = FailureGuard(config.control, books)
        self._current: tuple[e.Event, Nanoseconds] | None = None
        self._last: Nanoseconds = 0
        self._deferred: deque[tuple[int, c.Command]] = deque()
        self._saving: float | None = None
        """Since when the trainer has been writing the last checkpoint."""
        self._over_and_saved = False
        self._scaling: Scaling | None = None
        self._looked = 0.0
        self._troubled = ""
        self._bound = config.control.max_staleness

    # -- the seam ---------------------------------------------------------------------------------------------

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[e.Event, Nanoseconds] | None:
        """Wait for the next event."""
        while True:
            now = self.now()
            if self._events:
                return self._give(self._events.popleft(), now)
            begun = self._current is not None  # before the first event there is no deadline either
            if self.stopping or (wake_at is None and begun and self._over()):
                return None
            if wake_at is not None and now >= wake_at:
                return self._give(e.Tick(), now)
            until = _LOOK if wake_at is None else min(_LOOK, (wake_at - now) / SECOND)
            self._pump(until)

    def execute(self, commands: Iterable[c.Command]) -> None:
        """Begin what the commands ask for, after writing them down."""
        assert self._current is not None
        event, at = self._current
        answered = list(commands)
        number = self._parts.ledger.log(event, answered, at)
        self._parts.books.note(event, answered)
        self._verdicts.note(event, answered, self._parts.newest)
        self._note(event, at)
        for command in answered:
            if isinstance(command, _DURABLE):
                self._deferred.append((number, command))
                if isinstance(command, c.Apply):  # the trainer waits; nobody waits for a version to be freed
                    self._parts.ledger.sync()
            else:
                self._doing.do(command)
        self._parts.crew.share_cores()

    def now(self) -> Nanoseconds:
        """The run's clock; it never runs backwards."""
        self._last = max(self._last, self._clock() - self._origin)
        return self._last

    def begin(self, scaling: Scaling | None) -> None:
        """Start the processes; without a scaling, no instances."""
        self._parts.crew.begin_trainer(self._parts.config.trainer.ranks)
        self._scaling = scaling
        self._scale()

    def again(self, events: Iterable[e.Event], commands: Iterable[c.Command]) -> None:
        """After a restart: what has happened meanwhile, and what was asked for and not done."""
        self._events.extend(events)
        for command in commands:
            self._doing.do(command)

    def go_on_from(self, newest: Version | None, bound: int | None = None) -> None:
        """After a restart: the newest version that there is, and the bound if it is not the first any more."""
        self._parts.newest = newest
        self._bound = self._bound if bound is None else bound

    def rescaled(self, before: int, after: int) -> None:
        """Somebody has asked for another number of instances while the run goes on."""
        self._parts.ledger.record(setting_changed("rollout.instances", before, after), self.now())

    def evaluate_with(self, evaluation: Evaluation) -> None:
        """Evaluate beside training."""
        self._parts.evaluation = evaluation

    @property
    def judges(self) -> RewardClient:
        return self._parts.judges

    @property
    def evaluating(self) -> bool:
        """An evaluation is asked for and not over."""
        evaluation = self._parts.evaluation
        return evaluation is not None and evaluation.pending > 0

    def evaluate_again(self, done: set[Version]) -> None:
        """After a restart: evaluations that were asked for and have no result, before their weights are let go."""
        newest = self._parts.newest
        for version in self._parts.store.versions():
            if newest is not None and version <= newest and version not in done:
                self._noting.evaluate(version)

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over."""
        self._noting.evaluated(result)

    def _give(self, event: e.Event, now: Nanoseconds) -> tuple[e.Event, Nanoseconds]:
        self._current = (event, now)
        return self._current

    def _happen(self, event: e.Event) -> None:
        self._events.append(event)

    def _note(self, event: e.Event, at: Nanoseconds) -> None:
        match event:
            case e.TrainerLost():
                # A trainer that comes has nothing of what the one before it was to apply.
                self._deferred = deque(one for one in self._deferred if not isinstance(one[1], c.Apply))
                self._parts.crew.training = 0
            case e.BoundChanged(max_staleness=bound):
                self._parts.ledger.record(setting_changed(BOUND, self._bound, bound), at)
                self._bound = bound
            case e.Published():
                self._noting.published(event, at)
            case e.Moved():
                self._noting.moved(event, at)
                if self._doing.turns is not None:
                    self._doing.turns.moved(event)
            case _:
                pass

    # -- the end ----------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        """Nothing is left to decide: see the last checkpoint and the last evaluation through."""
        if self._deferred or self.evaluating:
            return False
        trainer = self._parts.crew.trainer
        if trainer.channel is None or trainer.last_message_at is None:
            return False  # there is nobody to ask yet; a trainer that comes up has a deadline for that
        if self._saving is None:
            self._saving = time.monotonic()
            trainer.send(m.SaveCheckpoint())
        elif not self._over_and_saved and time.monotonic() > self._saving + self._deadlines.train:
            self._lost(trainer, "saving took longer than deadlines.train")
        return self._over_and_saved

    def _saved(self, version: Version, _path: str) -> None:
        if version == self._parts.newest:
            self._over_and_saved = True
        else:
            self._saving = None  # it came back from an older checkpoint and is still catching up

    # -- waiting ----------------------------------------------------------------------------------------------

    def _pump(self, seconds: float) -> None:
        parts = self._parts
        due = parts.judges.next_due()
        if due is not None:
            seconds = min(seconds, due - time.monotonic())
        for process, said in parts.processes.wait(seconds):
            for message in said:
                if process.channel is not None:  # it may have been given up meanwhile, with what it said
                    self._hearing.take(process, message)
            if process.channel is not None and process.channel.closed:
                self._lost(process, process.reported_failure or "its process ended")
        self._release()
        for process in parts.judges.overdue():
            self._lost(process, "it hung over a reward", by_question=True)
        if time.monotonic() - self._looked > _LOOK:
            self._look()
        parts.crew.share_cores()

    def _look(self) -> None:
        """What is done now and then."""
        parts = self._parts
        self._looked = time.monotonic()
        parts.recorder.settle(self.now())
        parts.recorder.flush()
        self._doing.retire_again()
        self._scale()
        self._see_to_evaluation()
        for process, reason in parts.processes.unresponsive(self._deadlines.load, self._deadlines.heartbeat):
            if process.handle is not None:  # ranks are lost together
                self._lost(process, reason)
        if parts.ledger.write_error != self._troubled:
            self._troubled = parts.ledger.write_error
            if self._troubled:
                parts.notice(self._troubled)

    def _see_to_evaluation(self) -> None:
        """No run waits for an evaluation for ever."""
        evaluation = self._parts.evaluation
        patience = self._deadlines.load + self._deadlines.train  # an engine that does not come up is replaced first
        stuck = None if evaluation is None else evaluation.overdue(patience)
        if evaluation is None or stuck is None:
            return
        waits = stuck.handle is not None and stuck.handle.pending
        why = "there was no room for it" if waits else "it got nowhere"
        self._parts.processes.remove(stuck)
        evaluation.give_up()
        reason = f"{why} for {patience:g} s (deadlines.load and deadlines.train)"
        self._parts.recorder.note("lost", self.now(), who=stuck.name, reason=reason)
        self._parts.notice(f"{stuck.name} is given up: {reason}; the run goes on without evaluations")

    def _release(self) -> None:
        """Carry out what waited for the ledger."""
        ledger = self._parts.ledger
        if ledger.failure:
            raise RunError(ledger.failure)
        while self._deferred and self._deferred[0][0] <= ledger.durable:
            _, command = self._deferred.popleft()
            self._doing.do(command)

    @property
    def _deadlines(self) -> Deadlines:
        return self._parts.config.control.deadlines

    # -- losses -----------------------------------------------------------------------------------------------

    def _lost(self, process: WorkerProcess, reason: str, *, by_question: bool = False) -> None:
        """A process has ended, or is to end, without being asked to; perhaps over a question to user code."""
        parts = self._parts
        if process.role == "rank":
            parts.crew.trainer.reported_failure = parts.crew.trainer.reported_failure or process.reported_failure
            process, reason = parts.crew.trainer, f"{process.name}: {reason}"
        name = process.name
        if process.role == "reward":
            by_question = by_question or parts.judges.asked(process)
        again = parts.processes.lost(process, reason, by_question=by_question)
        parts.recorder.note("lost", self.now(), who=name, reason=reason)
        fate = "it is started again" if again else "it is given up after too many failures"
        parts.notice(f"{name} is lost: {reason}; {fate}")
        if process.role == "reward":
            parts.judges.lost(process)
        elif parts.evaluation is not None and parts.evaluation.owns(process):
            parts.evaluation.lost()
            if not again:
                parts.evaluation.give_up()
        elif process.role == "trainer":
            parts.crew.trainer_lost()
            self._saving = None
            self._happen(e.TrainerLost(reason=reason))
        else:
            self._instance_lost(process, reason, again=again)
        if not again:
            self._go_on_without(process)

    def _instance_lost(self, process: WorkerProcess, reason: str, *, again: bool) -> None:
        self._doing.moves.lost(process.name)
        self._happen(e.InstanceLost(instance=process.name, reason=reason))
        self._parts.crew.lost(process, again=again)

    def _scale(self) -> None:
        """Have as many instances as are wanted now."""
        if self._scaling is None:
            return
        wanted, crew = self._scaling.wanted(), self._parts.crew
        while len(crew.places) < wanted:
            crew.begin_instance()
        while len(crew.places) > wanted:
            # Of those given up nothing is lost, and somebody has to be left.
            leaving = next((one for one in crew.places if one.given_up), crew.places[-1])
            crew.places.remove(leaving)
            self._dismiss(leaving)

    def _dismiss(self, process: WorkerProcess) -> None:
        """An instance leaves: to the orchestrator it is lost, and its requests go on elsewhere from their tokens."""
        self._parts.processes.remove(process)
        reason = "the run has fewer instances now"
        self._parts.recorder.note("left", self.now(), who=process.name)
        self._parts.notice(f"{process.name} leaves: {reason}")
        self._instance_lost(process, reason, again=False)

    def _go_on_without(self, process: WorkerProcess) -> None:
        parts = self._parts
        left = [one for one in parts.processes.workers if one.role == process.role and not one.given_up]
        if parts.evaluation is not None:
            left = [one for one in left if not parts.evaluation.owns(one)]
        if not left:
            raise RunError(
                f"no {process.role} worker is left: {process.worker_id} failed {process.failures} times in a row, last "
                f"with: {process.last_failure}; see {process.worker_id}.log in the run's logs, then resume the run"
            )
        if process.role != "trainer":
            parts.notice(f"the run goes on with {len(left)} {process.role}{'s' if len(left) > 1 else ''}")
