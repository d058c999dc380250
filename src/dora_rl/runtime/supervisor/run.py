"""A run from beginning to end, or from where it was left: wires the parts together and drives the orchestrator.

A run is resumed by replaying its event log through a fresh orchestrator, which is then exactly where it was, and by
telling it that all instances and the trainer are lost, which is true. From there the ordinary handling of faults takes
over: requests go on from their tokens under their own version, the trainer from its checkpoint. There is no second way.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.interfaces import drive
from dora_rl.core.types import InstanceId, Nanoseconds, TrajectoryId, Version
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
from dora_rl.runtime.supervisor.evaluation import Evaluation, evaluated, held_out_problems
from dora_rl.runtime.supervisor.evaluation_sessions import EvaluationSessions
from dora_rl.runtime.supervisor.metrics_recorder import MetricsRecorder
from dora_rl.runtime.supervisor.replay import replay
from dora_rl.runtime.supervisor.scaling import Scaling
from dora_rl.runtime.supervisor.supervisor import Supervisor
from dora_rl.runtime.supervisor.trackers import trackers
from dora_rl.runtime.supervisor.trajectory_store import PromptSource, TrajectoryStore
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.trainer import checkpoint

if TYPE_CHECKING:
    from dora_rl.runtime.preflight import Prepared

_DYING = 1.0
"""Seconds in which a supervisor that was killed lets go of its run."""
_PATIENCE = 5.0
"""Seconds for processes to end by themselves."""


class Run:
    """One run, in this process and those that it starts."""

    def __init__(
        self,
        folder: RunDir,
        *,
        notice: Callable[[str], None] = lambda _: None,
        machine: Machine = Machine(),  # noqa: B008
        bound: int | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        self.folder = folder
        self._prepared = prepared
        """What was read when the run was checked, before it had a folder."""
        self._bound = bound
        """Another K than the run had so far."""
        self.config = folder.read()
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock(folder))
            self._backend = machine.backend(folder)
            undo.callback(self._backend.close)
            logs.configure(self.config.logging.level, folder.logs / "supervisor.log")
            undo.callback(logs.close)
            self._wire(notice, machine, undo)
            undo.pop_all()

    def _wire(self, notice: Callable[[str], None], machine: Machine, undo: contextlib.ExitStack) -> None:
        folder = self.folder
        ready = self._prepared
        self.text = Tokenization(load_tokenizer(self.config.model), self.config) if ready is None else ready.text
        self.dataset: Dataset = load(self.config.data, folder.base()) if ready is None else ready.dataset
        self.orchestrator = Orchestrator(self.config.control)
        control = self.config.control
        self._books = TrajectoryStore(PromptSource(self.dataset), self.text.encode, control.group_size)
        self._processes: ProcessManager | None = None
        self._ledger = Ledger(
            folder.ledger, control.group_size, mirror=folder.events, notify=self._wake, open_connection=machine.connect
        )
        undo.callback(self._ledger.close)
        self._provenance = Provenance(folder, self.config, self._ledger, notice)
        self._provenance.check()
        past = self._replay()
        origin = machine.clock() - past.at
        self._processes = ProcessManager(folder, self.config, self._backend, origin, past.incarnations)
        store = folder.store(self.config)
        self.recorder = MetricsRecorder(folder, trackers(folder, self.config), past.at)
        self.world = Supervisor(
            config=self.config,
            books=self._books,
            ledger=self._ledger,
            store=store,
            processes=self._processes,
            recorder=self.recorder,
            text=self.text,
            origin=origin,
            notice=notice,
            clock=machine.clock,
        )
        self.world.go_on_from(self.orchestrator.newest, past.bound)
        self._evaluate(store)
        self._past = past
        self._provenance.record(past.at)

    def go(self, watch: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left to do, or the world is told to stop; `watch` is called after each event."""
        try:
            if self._past.at:
                self.world.evaluate_again(evaluated(self.folder.metrics))
                changed = [] if self._bound is None else [e.BoundChanged(max_staleness=self._bound)]
                self.world.again([*self._past.losses(), *changed], self._past.open_commands())
            if not self.orchestrator.finished or not self._saved() or self.world.evaluating:
                self.world.begin(
                    None if self.orchestrator.finished else Scaling(self.folder, self._backend, self.world.rescaled)
                )
                drive(_Watched(self.orchestrator, watch), self.world)
        finally:
            self.close()

    def close(self) -> None:
        """End all processes; what is finished is kept."""
        assert self._processes is not None
        self._processes.stop(patience=_PATIENCE)
        sweep()  # what instances that were killed have left in shared memory
        self._provenance.look_again(self.world.now())
        self._ledger.close()
        self.recorder.settle(self.world.now())
        self.recorder.close()
        self._lock.close()
        logs.close()
        if self.orchestrator.finished and self.config.weights == "memory" and not self.world.evaluating:
            self.folder.store(self.config).clear()

    def _saved(self) -> bool:
        """The run's last version is a checkpoint."""
        return self.orchestrator.newest in checkpoint.versions(self.folder.checkpoints)

    def _evaluate(self, store: Any) -> None:
        settings = self.config.evaluation
        if not settings.every:
            return
        held_out = None if self._prepared is None else self._prepared.held_out
        if held_out is None:
            held_out = held_out_problems(self.config, self.folder.base(), self.dataset)
        self.world.evaluate_with(
            Evaluation(
                [(problem, self.text.encode(problem)) for problem in held_out],
                self.config.request_sampling(self.text.stop_ids, temperature=settings.temperature),
                settings.samples,
                settings.success_threshold,
                self.config.reward.timeout_seconds,
                store,
                self.text.decode,
                self.world.evaluated,
                self._evaluation_turns() if self.config.environment.kind is not None else None,
            )
        )

    def _evaluation_turns(self) -> Callable[..., EvaluationSessions]:
        """Held-out prompts are played through the environment as those of training are."""
        return functools.partial(
            EvaluationSessions,
            text=self.text,
            judges=self.world.judges,
            most_tokens=self.config.control.max_response_tokens,
            most_context=self.config.rollout.engine.max_context,
            most_requests=self.config.rollout.engine.max_requests,
            timeout=self.config.environment.timeout_seconds,
        )

    def _wake(self) -> None:
        if self._processes is not None:
            self._processes.wake()

    def _replay(self) -> _Past:
        past = _Past()
        for logged in replay(self.orchestrator, self._ledger.events()):
            self._books.note(logged.event, list(logged.commands))
            past.note(logged.event, logged.commands, logged.at)
        self._ledger.check_tables()
        for group in self._books.groups.values():
            for trajectory in group.trajectories:
                self._books.recall(self._ledger, trajectory)
        self._compare(checkpoint.versions(self.folder.checkpoints))
        if not self.orchestrator.finished:
            self._hold(past.held)
        return past

    def _hold(self, versions: set[Version]) -> None:
        """Groups in flight go on under their own version, so its weights must still be there."""
        gone = sorted(versions - set(self.folder.store(self.config).versions())) if versions else []
        if gone:
            hint = "; weights in memory do not outlive a restart" if self.config.weights == "memory" else ""
            raise IntegrityError(f"the run can't be resumed: the weights of version {gone[0]} are gone{hint}")

    def _compare(self, checkpoints: list[Version]) -> None:
        """An update is begun only when the ledger has it on disk, so no checkpoint can be ahead of the ledger."""
        newest = -1 if self.orchestrator.newest is None else self.orchestrator.newest
        if checkpoints and checkpoints[-1] > newest + 1:
            raise IntegrityError(
                f"{self.folder.ledger} ends with version {newest}, but there is a checkpoint of version "
                f"{checkpoints[-1]}: the ledger has lost what was on disk; put back a copy of it"
            )


class _Watched:
    """The orchestrator, with somebody who looks on."""

    def __init__(self, orchestrator: Orchestrator, watch: Callable[[], None]) -> None:
        self._orchestrator = orchestrator
        self._watch = watch

    def step(self, event: e.Event, now: Nanoseconds) -> list[c.Command]:
        commands = self._orchestrator.step(event, now)
        self._watch()
        return commands

    def wake_at(self) -> Nanoseconds | None:
        return self._orchestrator.wake_at()


class _Past:
    """What of a replayed log is still open."""

    def __init__(self) -> None:
        self.at: Nanoseconds = 0
        self.held: set[Version] = set()
        """Versions that were published and not retired."""
        self.incarnations: dict[str, int] = {}
        """The last life of each place: names are never used again."""
        self.bound: int | None = None
        """K, if it was changed."""
        self._instances: dict[InstanceId, None] = {}
        self._scores: dict[TrajectoryId, c.Score] = {}
        self._fetch: c.FetchPrompts | None = None
        self._retired: list[c.Retire] = []

    def note(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:
        self.at = at
        match event:
            case e.InstanceJoined(spec=spec):
                self._instances[spec.instance] = None
                worker_id, _, incarnation = spec.instance.rpartition(".")
                self.incarnations[worker_id] = max(int(incarnation), self.incarnations.get(worker_id, 0))
            case e.InstanceLost(instance=instance):
                self._instances.pop(instance, None)
            case e.Scored(trajectory=trajectory) | e.TrajectoryFailed(trajectory=trajectory):
                self._scores.pop(trajectory, None)
            case e.PromptsArrived():
                self._fetch = None
            case e.BoundChanged(max_staleness=bound):
                self.bound = bound
            case e.Published(version=version):
                self.held.add(version)
            case _:
                pass
        for command in commands:
            match command:
                case c.Score(trajectory=trajectory):
                    self._scores[trajectory] = command
                case c.FailTrajectory(trajectory=trajectory):
                    self._scores.pop(trajectory, None)
                case c.FetchPrompts():
                    self._fetch = command
                case c.Retire():
                    self._retired.append(command)
                    self.held.discard(command.version)
                case c.EvictInstance(instance=instance):
                    self._instances.pop(instance, None)
                case _:
                    pass

    def losses(self) -> Iterator[e.Event]:
        """All processes of the former supervisor are gone."""
        for instance in self._instances:
            yield e.InstanceLost(instance=instance, reason="the supervisor was restarted")
        yield e.TrainerLost(reason="the supervisor was restarted")

    def open_commands(self) -> Iterator[c.Command]:
        """What was asked for and has no answer yet, or may not have been carried out."""
        yield from self._scores.values()
        yield from self._retired
        if self._fetch is not None:
            yield self._fetch


def _lock(folder: RunDir) -> Any:
    """One supervisor at a time."""
    file = folder.lock.open("w")
    end = time.monotonic() + _DYING
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                file.close()
                raise UserError(f"the run {folder.path} is already going on in another process") from None
            time.sleep(0.02)
        else:
            return file
