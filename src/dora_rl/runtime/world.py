"""The local world: processes of one machine behind the orchestrator's commands.

    instances --tokens, events-->  supervisor  --groups-->  trainer
        ^------ requests, moves ------'  ^------ verdicts ------ judges

Who waits for whom: an instance waits for requests; the trainer for groups; a judge for questions; the supervisor for
any of them, or for the orchestrator's next deadline. Nobody waits while holding what another waits for.

Invariants:
- events reach the orchestrator one at a time, each written down with the commands that answered it;
- what can't be undone is begun only when the event that asked for it is durable (`_DURABLE`);
- tokens are in the books before the event that follows from them reaches the orchestrator.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.accounting import Activity
from dora_rl.core.errors import IntegrityError, RunError, StoreError, UserError
from dora_rl.core.labels import Because, Cause, Label
from dora_rl.core.nouns import SECOND, InstanceId, Nanoseconds, SlotId, TrajectoryId, Version
from dora_rl.engine.requests import Request
from dora_rl.runtime import messages as m
from dora_rl.runtime.books import Books
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.judges import Judges
from dora_rl.runtime.moves import Moves
from dora_rl.runtime.processes import Process, Processes
from dora_rl.runtime.recorder import Recorder
from dora_rl.runtime.text import Text
from dora_rl.runtime.threads import share
from dora_rl.runtime.turns import Turns
from dora_rl.runtime.verdicts import Verdicts

if TYPE_CHECKING:
    from dora_rl.ledger.ledger import Ledger
    from dora_rl.runtime.evaluation import Evaluated, Evaluation
    from dora_rl.weights.store import WeightStore

_DURABLE = (c.Apply, c.Retire)
_LOOK = 0.5
"""Seconds between two looks at deadlines and files, if nothing happens."""


class LocalWorld:
    """Carries out commands with the processes of this machine."""

    def __init__(
        self,
        config: RunConfig,
        cores: int,
        books: Books,
        ledger: Ledger,
        store: WeightStore,
        processes: Processes,
        recorder: Recorder,
        text: Text,
        origin: Nanoseconds,
        notice: Callable[[str], None],
        clock: Callable[[], Nanoseconds] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.books = books
        self.recorder = recorder
        self.stopping = False
        """Set from a signal handler: end, with everything kept."""
        self.newest: Version | None = None
        self._cores = cores
        self._ledger = ledger
        self._store = store
        self._processes = processes
        self._sampling = config.request_sampling(text.stop_ids)
        self._text = text
        self._origin = origin
        self._clock = clock
        self._notice = notice
        self._events: deque[e.Event] = deque()
        self._verdicts = Verdicts(config.control, books)
        self._current: tuple[e.Event, Nanoseconds] | None = None
        self._last: Nanoseconds = 0
        self._deferred: deque[tuple[int, c.Command]] = deque()
        self._moves = Moves(self._instance, self._happen)
        self._judges = Judges(processes, config.reward.workers)
        self._turns: Turns | None = None
        if config.environment.kind is not None:
            self._turns = Turns(
                books,
                text,
                self._judges,
                ledger,
                self._instance,
                self._submit_one,
                self._happen,
                config.control.max_response_tokens,
                config.environment.timeout_seconds,
            )
        self.evaluation: Evaluation | None = None
        self._instances: dict[InstanceId, Process] = {}
        self._trainer: Process | None = None
        self._training = 0
        """Groups that the trainer has not reported back, and a step that it applies."""
        self._retiring: set[Version] = set()
        self._saving: float | None = None
        """Since when the trainer has been writing the last checkpoint."""
        self.saved: str | None = None
        """The last checkpoint, once the run is over."""
        self._looked = 0.0
        self._troubled = ""

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

    def carry_out(self, commands: Iterable[c.Command]) -> None:
        """Begin what the commands ask for, after writing them down."""
        assert self._current is not None
        event, at = self._current
        answered = list(commands)
        number = self._ledger.log(event, answered, at)
        self.books.note(event, answered)
        self._verdicts.note(event, answered, self.newest)
        self._note(event, at)
        for command in answered:
            if isinstance(command, _DURABLE):
                self._deferred.append((number, command))
                self._ledger.sync()
            else:
                self._handlers[type(command)](self, command)
        self._share_cores()

    def now(self) -> Nanoseconds:
        """The run's clock; it never runs backwards."""
        self._last = max(self._last, self._clock() - self._origin)
        return self._last

    def begin(self, instances: int) -> None:
        """Start the processes."""
        self._trainer = self._processes.start("trainer", "trainer", self._cores)
        for number in range(instances):
            self._begin_instance(self._processes.start("instance", f"i{number}", 1))

    def again(self, events: Iterable[e.Event], commands: Iterable[c.Command]) -> None:
        """After a restart: what has happened meanwhile, and what was asked for and not done."""
        self._events.extend(events)
        for command in commands:
            self._handlers[type(command)](self, command)

    def _give(self, event: e.Event, now: Nanoseconds) -> tuple[e.Event, Nanoseconds]:
        self._current = (event, now)
        return self._current

    def _happen(self, event: e.Event) -> None:
        self._events.append(event)

    def _over(self) -> bool:
        """Nothing is left to decide: see the last checkpoint and the last evaluation through."""
        if self._deferred or (self.evaluation is not None and self.evaluation.pending):
            return False
        assert self._trainer is not None
        if self._saving is None:
            self._saving = time.monotonic()
            self._trainer.send(m.Save())
        elif self.saved is None and time.monotonic() > self._saving + self.config.control.deadlines.train:
            self._lost(self._trainer, "saving took longer than deadlines.train")
        return self.saved is not None

    # -- listening --------------------------------------------------------------------------------------------

    def _pump(self, seconds: float) -> None:
        due = self._judges.next_due()
        if due is not None:
            seconds = min(seconds, due - time.monotonic())
        for process, said in self._processes.wait(seconds):
            for message in said:
                self._take(process, message)
            if process.channel is not None and process.channel.closed:
                self._lost(process, process.said or "its process ended")
        self._release()
        for process in self._judges.overdue():
            self._lost(process, "it hung over a reward")
        if time.monotonic() - self._looked > _LOOK:
            self._look()
        self._share_cores()

    def _take(self, process: Process, message: m.FromProcess) -> None:
        if isinstance(message, m.Died):
            if message.by_user:
                raise UserError(message.reason)
            if message.final:
                raise RunError(
                    f"{message.reason}; the checkpoint before it is kept: begin a new run from that with a lower "
                    "trainer.optimiser.learning_rate, or mend what made these trajectories and resume the run"
                )
            process.said = message.reason
            self._notice(f"{process.name}: {message.reason}")
        elif process.role == "judge":
            if isinstance(message, m.Ready):
                self._judges.ready(process)
            else:
                assert isinstance(message, m.Judged | m.Played)
                self._judges.replied(process, message)
        elif self.evaluation is not None and self.evaluation.owns(process):
            self.evaluation.hear(message, self._judges)
        elif process.role == "trainer":
            self._take_from_trainer(message)
        else:
            self._take_from_instance(process, message)

    def _take_from_instance(self, process: Process, message: m.FromProcess) -> None:
        match message:
            case m.Joined(spec=spec):
                self._happen(e.InstanceJoined(spec=spec))
            case m.Report():
                self._report(process, message)
            case m.Exported():
                if message.problem:
                    self._notice(f"{process.name}: {message.problem}")
                else:
                    process.busy.difference_update(message.trajectories)
                self._moves.exported(message)
            case m.Imported():
                process.busy.update(message.arrived)
                self.recorder.arrived(len(message.arrived))
                for problem in message.problems:
                    self._notice(f"{process.name}: {problem}")
                self._moves.imported(message)
            case m.Refused(trajectory=trajectory):
                assert self._turns is not None
                self._turns.refused(trajectory, process.name)
            case m.Spent():
                self.recorder.spent(process.name, message)
            case m.Counted(figures=figures):
                self.recorder.counted[process.name] = figures
            case m.Alive():
                pass  # hearing it was all
            case _:
                raise AssertionError(f"not from an instance: {message}")

    def _report(self, process: Process, report: m.Report) -> None:
        rows = []
        try:
            for said in report.said:
                row = self.books.take(said)
                if row is not None:
                    rows.append(row)
        except IntegrityError as error:
            # What it says has a gap: what else it says is not to be trusted either.
            self._ledger.said(rows, [])
            self._lost(process, str(error))
            return
        ended = []
        for end in report.ended:
            process.busy.discard(end.trajectory)
            book = self.books.find(end.trajectory)
            if book is not None and book.attempt == end.attempt and not book.failed:
                book.ended = end.reason
                ended.append((end.trajectory, end.reason))
        self._ledger.said(rows, ended)
        for event in report.events:
            if isinstance(event, e.TrajectoryFailed):
                process.busy.discard(event.trajectory)
            if isinstance(event, e.Parked):
                assert self._turns is not None
                self._turns.parked(event)
            else:
                self._happen(event)

    def _take_from_trainer(self, message: m.FromProcess) -> None:
        match message:
            case m.Report(events=events):
                for event in events:
                    if isinstance(event, e.Accumulated):
                        self._training = max(0, self._training - event.groups)
                    elif isinstance(event, e.Trained):
                        self._training = 0
                    self._happen(event)
                self._label_trainer()
            case m.Stepped(step=step, metrics=metrics):
                groups = [group for group in self.books.groups.values() if group.step == step]
                self.recorder.stepped(step, metrics, groups)
                self._write_samples(step)
            case m.Saved(version=version, path=path):
                if version == self.newest:
                    self.saved = path
                else:
                    self._saving = None  # it came back from an older checkpoint and is still catching up
            case _:
                raise AssertionError(f"not from the trainer: {message}")

    def _lost(self, process: Process, reason: str) -> None:
        """A process has ended, or is to end, without being asked to."""
        name = process.name
        again = self._processes.bury(process, reason)
        self.recorder.note("lost", self.now(), who=name, reason=reason)
        fate = "it is started again" if again else "it is given up after too many failures"
        self._notice(f"{name} is lost: {reason}; {fate}")
        if process.role == "judge":
            self._judges.lost(process)
        elif self.evaluation is not None and self.evaluation.owns(process):
            self.evaluation.lost()
            if not again:
                self.evaluation.give_up()
        elif process.role == "trainer":
            self._training = 0
            self._saving = None
            self._happen(e.TrainerLost(reason=reason))
        else:
            self._instances.pop(name, None)
            self._moves.lost(name)
            self._happen(e.InstanceLost(instance=name, reason=reason))
            if again:
                self._begin_instance(process, life=process.life + 1)
        if not again:
            self._go_on_without(process)

    def _go_on_without(self, process: Process) -> None:
        left = [one for one in self._processes.all if one.role == process.role and not one.given_up]
        if self.evaluation is not None:
            left = [one for one in left if not self.evaluation.owns(one)]
        if not left:
            raise RunError(
                f"no {process.role} is left: {process.place} failed {process.failures} times in a row, last with: "
                f"{process.last_words}; see {process.place}.log in the run's logs, then resume the run"
            )
        if process.role != "trainer":
            self._notice(f"the run goes on with {len(left)} {process.role}{'s' if len(left) > 1 else ''}")

    def _look(self) -> None:
        """What is done now and then."""
        self._looked = time.monotonic()
        self.recorder.settle(self.now())
        self.recorder.flush()
        for version in sorted(self._retiring):
            self._try_to_retire(version)
        deadlines = self.config.control.deadlines
        for process, reason in self._processes.silent(deadlines.load, deadlines.heartbeat):
            self._lost(process, reason)
        if self._ledger.trouble != self._troubled:
            self._troubled = self._ledger.trouble
            if self._troubled:
                self._notice(self._troubled)

    def _release(self) -> None:
        """Carry out what waited for the ledger."""
        if self._ledger.failure:
            raise RunError(self._ledger.failure)
        while self._deferred and self._deferred[0][0] <= self._ledger.durable:
            _, command = self._deferred.popleft()
            self._handlers[type(command)](self, command)

    # -- figures ----------------------------------------------------------------------------------------------

    def _note(self, event: e.Event, at: Nanoseconds) -> None:
        match event:
            case e.TrainerLost():
                # A trainer that comes has nothing of what the one before it was to apply.
                self._deferred = deque(one for one in self._deferred if not isinstance(one[1], c.Apply))
                self._training = 0
            case e.Published(version=version):
                self.newest = version
                live = self.books.live_versions
                verdicts = sum(self.books.failed.values())
                self.recorder.published(version, at, live, verdicts, self._ledger.seconds)
                self.recorder.note("published", at, version=version)
                self._evaluate(version)
            case e.Moved():
                count, source, target = len(event.trajectories), str(event.source), str(event.target)
                self.recorder.note("moved", at, source=source, target=target, count=count)
                if self._turns is not None:
                    self._turns.moved(event.trajectories, event.target)
            case _:
                pass

    def _evaluate(self, version: Version) -> None:
        steps = self.config.control.steps
        every = self.config.evaluation.every
        if self.evaluation is not None and every and (version % every == 0 or version == steps):
            self.evaluation.ask(version, self._processes)

    def evaluate_again(self, done: set[Version]) -> None:
        """After a restart: evaluations that were asked for and have no result, before their weights are let go."""
        for version in self._store.versions():
            if self.newest is not None and version <= self.newest and version not in done:
                self._evaluate(version)

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over."""
        self.recorder.evaluated(result, self.now())

    def _write_samples(self, step: int) -> None:
        chosen = [(g, book) for g, book in self.books.groups.items() if book.step == step]
        for group, book in chosen[: self.config.logging.samples]:
            for trajectory, one in book.trajectories.items():
                record = {
                    "step": step,
                    "group": group,
                    "trajectory": trajectory,
                    "version": book.version,
                    "versions": one.versions,
                    "prompt": self._text.decode(book.prompt),
                    "response": self._text.decode(one.response),
                    "tokens": len(one.response),
                    "reward": one.reward,
                    "stop": one.ended,
                }
                self.recorder.sample(record)

    def _label_trainer(self, cause: Cause | None = None) -> None:
        now = self.now()
        account = self.recorder.trainer
        if self._training:
            account.switch(now, Activity(Label.TRAIN, self.newest))
        elif account.current.label is not Label.IDLE or cause is not None:
            account.switch(now, Activity(Label.IDLE, self.newest, cause or Cause(because=Because.ROLLOUT)))

    def _share_cores(self) -> None:
        busy = sum(bool(process.busy) for process in self._instances.values())
        shares = share(self._cores, busy, trainer_busy=bool(self._training))
        for process in self._instances.values():
            self._set_threads(process, shares.instance)
        if self._trainer is not None:
            self._set_threads(self._trainer, shares.trainer)

    def _set_threads(self, process: Process, threads: int) -> None:
        if process.threads != threads:
            process.threads = threads
            process.send(m.Threads(count=threads))

    # -- commands ---------------------------------------------------------------------------------------------

    def _begin_instance(self, process: Process, life: int | None = None) -> None:
        self._instances[f"{process.place}.{life or process.life}"] = process

    def _instance(self, name: InstanceId) -> Process | None:
        process = self._instances.get(name)
        return process if process is not None and process.name == name else None

    def _to(self, name: InstanceId, message: m.Message) -> Process | None:
        """To an instance that is gone nothing is sent: the orchestrator is being told so."""
        process = self._instance(name)
        if process is not None:
            process.send(message)
        return process

    def _fetch(self, command: c.FetchPrompts) -> None:
        self._happen(self.books.fetch(command.count))

    def _at_slot(self, command: c.LoadVersion | c.UnloadSlot | c.SlotIdles) -> None:
        self._to(command.slot.instance, m.Do(command=command))

    def _start(self, command: c.StartGroup) -> None:
        group = self.books.groups[command.group]
        if self._turns is not None:
            for trajectory in group.trajectories:
                self._turns.start(trajectory, command.slot)
            return
        requests = tuple(self._request(trajectory, command.version) for trajectory in group.trajectories)
        self._submit(command.slot, requests)

    def _resume(self, command: c.Resume) -> None:
        if self._turns is not None and self.books.trajectory(command.trajectory).ended is None:
            self._turns.resume(command.trajectory, command.attempt, command.slot)
        else:
            self._submit_one(command.trajectory, command.slot)

    def _submit_one(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Go on with a trajectory from its tokens."""
        book = self.books.trajectory(trajectory)
        if book.ended is not None:
            # All its tokens are here; only the report of its end was lost.
            version = book.versions[-1]
            self._happen(
                e.Generated(
                    trajectory=trajectory,
                    attempt=book.attempt,
                    instance=slot.instance,
                    version=version,
                    fingerprint=self.books.fingerprints[version],
                    tokens=len(book.response),
                    kv_tokens=0,
                )
            )
            return
        self._submit(slot, (self._request(trajectory, self.books.group_of(trajectory).version),))

    def _request(self, trajectory: TrajectoryId, version: Version) -> Request:
        group = self.books.group_of(trajectory)
        book = group.trajectories[trajectory]
        return Request(
            trajectory=trajectory,
            attempt=book.attempt,
            version=version,
            prompt=group.prompt,
            response=tuple(book.response),
            sampling=self._sampling,
            parks=self._turns is not None,
            record_experts=self.config.trainer.moe.replay_routing and self._text.mixture,
        )

    def _submit(self, slot: SlotId, requests: tuple[Request, ...]) -> None:
        process = self._to(slot.instance, m.Submit(slot=slot.number, requests=requests))
        if process is not None:
            process.busy.update(request.trajectory for request in requests)

    def _move(self, command: c.Move) -> None:
        self._moves.begin(command)

    def _abort(self, command: c.Abort) -> None:
        process = self._to(command.instance, m.Do(command=command))
        if process is not None:
            process.busy.discard(command.trajectory)

    def _score(self, command: c.Score) -> None:
        trajectory = command.trajectory
        if self._turns is not None:
            self._turns.score(trajectory, lambda verdict: self._judged(trajectory, verdict))
            return
        tokens = tuple(self.books.trajectory(trajectory).response)
        problem = self.books.group_of(trajectory).problem
        question = m.Judge(item=0, problem=problem, completion=self._text.decode(tokens), tokens=tokens)
        timeout = self.config.reward.timeout_seconds
        self._judges.ask(question, lambda verdict: self._judged(trajectory, verdict), timeout)

    def _judged(self, trajectory: TrajectoryId, verdict: m.Judged | m.Played) -> None:
        if isinstance(verdict, m.Played) or verdict.reward is None:
            self._happen(e.TrajectoryFailed(trajectory=trajectory, reason=verdict.failed or "no verdict"))
        else:
            self._happen(e.Scored(trajectory=trajectory, reward=verdict.reward))

    def _accumulate(self, command: c.Accumulate) -> None:
        assert self._trainer is not None
        groups = tuple(self.books.trained(group) for group in command.groups)
        self._training += len(groups)
        self._label_trainer()
        self._share_cores()
        self._trainer.send(m.Train(step=command.step, attempt=command.attempt, groups=groups))

    def _to_trainer(self, command: c.Apply | c.Publish) -> None:
        assert self._trainer is not None
        if isinstance(command, c.Apply):
            self._training += 1
            self._label_trainer()
        else:
            self.recorder.trainer.switch(self.now(), Activity(Label.PUBLISH, command.version))
        self._trainer.send(m.Do(command=command))

    def _retire(self, command: c.Retire) -> None:
        self._try_to_retire(command.version)

    def _try_to_retire(self, version: Version) -> None:
        try:
            self._store.retire(version)
            self._retiring.discard(version)
        except StoreError:
            # An evaluation may still hold it; one that was freed before a crash is gone already.
            if version in self._store.versions():
                self._retiring.add(version)
            else:
                self._retiring.discard(version)

    def _evict(self, command: c.EvictInstance) -> None:
        process = self._instance(command.instance)
        if process is not None:
            self._lost(process, command.reason)

    def _restart_trainer(self, command: c.RestartTrainer) -> None:
        assert self._trainer is not None
        self._lost(self._trainer, command.reason)

    def _trainer_idles(self, command: c.TrainerIdles) -> None:
        if not self._training:
            self._label_trainer(command.cause)

    def _stalled(self, command: c.Stalled) -> None:
        self._notice("nothing moves: " + "; ".join(command.waits))

    def _failed(self, command: c.FailTrajectory) -> None:
        if self._turns is not None:
            self._turns.forget(command.trajectory)

    def _nothing(self, command: c.Command) -> None:
        """The books have taken note already."""

    _handlers: ClassVar[dict[type[c.Command], Callable[..., None]]] = {
        c.FetchPrompts: _fetch,
        c.LoadVersion: _at_slot,
        c.UnloadSlot: _at_slot,
        c.SlotIdles: _at_slot,
        c.StartGroup: _start,
        c.Resume: _resume,
        c.Move: _move,
        c.Abort: _abort,
        c.Score: _score,
        c.Accumulate: _accumulate,
        c.Apply: _to_trainer,
        c.Publish: _to_trainer,
        c.Retire: _retire,
        c.FailTrajectory: _failed,
        c.GroupFailed: _nothing,
        c.EvictInstance: _evict,
        c.RestartTrainer: _restart_trainer,
        c.TrainerIdles: _trainer_idles,
        c.Stalled: _stalled,
    }
