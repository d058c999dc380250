"""The orchestrator's commands, as messages to processes.

Invariants:
- to a process that is gone nothing is sent: the orchestrator is being told so, and whoever waits has a deadline;
- a version that cannot be freed yet is tried again until it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.errors import StoreError
from dora_rl.core.time_accounting import Activity
from dora_rl.core.types import SlotId, TrajectoryId, Version
from dora_rl.engine.requests import Request
from dora_rl.runtime.supervisor.env_sessions import EnvSessions
from dora_rl.runtime.supervisor.moves import Moves
from dora_rl.runtime.supervisor.noting import Noting
from dora_rl.runtime.supervisor.parts import Parts
from dora_rl.runtime.transport import messages as m


class Doing:
    """The hands of a run."""

    def __init__(self, parts: Parts, noting: Noting) -> None:
        self._parts = parts
        self._noting = noting
        config = parts.config
        self._sampling = config.request_sampling(parts.text.stop_ids)
        self.moves = Moves(parts.crew.instance, parts.happen, parts.processes.backend.discard_kv)
        self.turns: EnvSessions | None = None
        if config.environment.kind is not None:
            self.turns = EnvSessions(
                parts.books,
                parts.text,
                parts.judges,
                parts.ledger,
                parts.crew.instance,
                self._submit_one,
                parts.happen,
                config.control.max_response_tokens,
                config.rollout.engine.max_context,
                config.environment.timeout_seconds,
            )
        self._retiring: set[Version] = set()

    def do(self, command: c.Command) -> None:
        """Begin what a command asks for."""
        self._handlers[type(command)](self, command)

    def retire_again(self) -> None:
        """Free versions that somebody still held when they were to be freed."""
        for version in sorted(self._retiring):
            self._try_to_retire(version)

    # -- instances --------------------------------------------------------------------------------------------

    def _fetch(self, command: c.FetchPrompts) -> None:
        self._parts.happen(self._parts.books.fetch(command.count))

    def _at_slot(self, command: c.LoadVersion | c.UnloadSlot | c.SlotIdles) -> None:
        self._parts.crew.to(command.slot.instance, m.RunCommand(command=command))

    def _start(self, command: c.StartGroup) -> None:
        group = self._parts.books.groups[command.group]
        if self.turns is not None:
            for trajectory in group.trajectories:
                self.turns.start(trajectory, command.slot)
            return
        requests = tuple(self._request(trajectory, command.version) for trajectory in group.trajectories)
        self._submit(command.slot, requests)

    def _resume(self, command: c.Resume) -> None:
        if self.turns is not None and self._parts.books.trajectory(command.trajectory).ended is None:
            self.turns.resume(command.trajectory, command.attempt, command.slot)
        else:
            self._submit_one(command.trajectory, command.slot)

    def _submit_one(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Go on with a trajectory from its tokens."""
        books = self._parts.books
        book = books.trajectory(trajectory)
        if book.ended is not None:
            # All its tokens are here; only the report of its end was lost.
            version = book.versions[-1]
            self._parts.happen(
                e.Generated(
                    trajectory=trajectory,
                    attempt=book.attempt,
                    instance=slot.instance,
                    version=version,
                    fingerprint=books.fingerprints[version],
                    tokens=len(book.response),
                    kv_tokens=0,
                )
            )
            return
        self._submit(slot, (self._request(trajectory, books.group_of(trajectory).version),))

    def _request(self, trajectory: TrajectoryId, version: Version) -> Request:
        group = self._parts.books.group_of(trajectory)
        book = group.trajectories[trajectory]
        return Request(
            trajectory=trajectory,
            attempt=book.attempt,
            version=version,
            prompt=group.prompt,
            response=tuple(book.response),
            sampling=self._sampling,
            parks=self.turns is not None,
            record_experts=self._parts.config.trainer.moe.replay_routing and self._parts.text.mixture,
        )

    def _submit(self, slot: SlotId, requests: tuple[Request, ...]) -> None:
        process = self._parts.crew.to(slot.instance, m.SubmitRequests(slot=slot.number, requests=requests))
        if process is not None:
            process.busy.update(request.trajectory for request in requests)

    def _move(self, command: c.Move) -> None:
        self.moves.begin(command)

    def _abort(self, command: c.Abort) -> None:
        process = self._parts.crew.to(command.instance, m.RunCommand(command=command))
        if process is not None:
            process.busy.discard(command.trajectory)

    def _evict(self, command: c.EvictInstance) -> None:
        process = self._parts.crew.instance(command.instance)
        if process is not None:
            self._parts.lost(process, command.reason)

    def _failed(self, command: c.FailTrajectory) -> None:
        if self.turns is not None:
            self.turns.failed(command.trajectory)

    # -- judges -----------------------------------------------------------------------------------------------

    def _score(self, command: c.Score) -> None:
        parts, trajectory = self._parts, command.trajectory
        if self.turns is not None:
            self.turns.score(trajectory, lambda verdict: self._judged(trajectory, verdict))
            return
        tokens = tuple(parts.books.trajectory(trajectory).response)
        problem = parts.books.group_of(trajectory).problem
        question = m.ScoreRequest(item=0, problem=problem, completion=parts.text.decode(tokens), tokens=tokens)
        timeout = parts.config.reward.timeout_seconds
        parts.judges.ask(question, lambda verdict: self._judged(trajectory, verdict), timeout)

    def _judged(self, trajectory: TrajectoryId, verdict: m.ScoreResult | m.EnvResult) -> None:
        if isinstance(verdict, m.EnvResult) or verdict.reward is None:
            self._parts.happen(e.TrajectoryFailed(trajectory=trajectory, reason=verdict.failed or "no verdict"))
        else:
            self._parts.happen(e.Scored(trajectory=trajectory, reward=verdict.reward, components=verdict.components))

    # -- trainer ----------------------------------------------------------------------------------------------

    def _accumulate(self, command: c.Accumulate) -> None:
        crew = self._parts.crew
        groups = tuple(self._parts.books.trained(group) for group in command.groups)
        crew.training += len(groups)
        self._noting.label_trainer()
        crew.share_cores()
        crew.trainer.send(m.TrainGroups(step=command.step, attempt=command.attempt, groups=groups))

    def _to_trainer(self, command: c.Apply | c.Publish) -> None:
        parts = self._parts
        if isinstance(command, c.Apply):
            parts.crew.training += 1
            self._noting.label_trainer()
        else:
            parts.recorder.trainer.switch(parts.now(), Activity(ActivityLabel.PUBLISH, command.version))
        parts.crew.trainer.send(m.RunCommand(command=command))

    def _restart_trainer(self, command: c.RestartTrainer) -> None:
        self._parts.lost(self._parts.crew.trainer, command.reason)

    def _trainer_idles(self, command: c.TrainerIdles) -> None:
        if not self._parts.crew.training:
            self._noting.label_trainer(command.cause)

    # -- versions ---------------------------------------------------------------------------------------------

    def _retire(self, command: c.Retire) -> None:
        self._try_to_retire(command.version)

    def _try_to_retire(self, version: Version) -> None:
        store = self._parts.store
        try:
            store.retire(version)
            self._parts.processes.backend.version_retired(version)
            self._retiring.discard(version)
        except StoreError:
            # An evaluation may still hold it; one that was freed before a crash is gone already.
            if version in store.versions():
                self._retiring.add(version)
            else:
                self._retiring.discard(version)

    def _stalled(self, command: c.Stalled) -> None:
        self._parts.notice("nothing moves: " + "; ".join(command.waits))

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
