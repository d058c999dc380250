"""The supervisor's side of the evaluator: held-out prompts on an engine that the orchestrator does not know of.

Evaluations run beside training, one at a time, each pinned to one version.

Invariants:
- the weights of a version are leased until its evaluation is complete;
- an evaluation takes no request and no weights from rollout; its cost is the CPU time that it shares;
- once the evaluator is given up, nothing is pending and nothing is leased, so no run waits for it.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError
from dora_rl.core.types import SlotId, TrajectoryId, Version
from dora_rl.engine.requests import Request, Sampling
from dora_rl.envs.data import Problem
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.held_out import first_trajectory
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.evaluation_sessions import EvaluationSessions
    from dora_rl.runtime.supervisor.reward_client import OnReply
    from dora_rl.weights.store import Lease, WeightStore

Score = Callable[[Problem, tuple[int, ...], "OnReply"], None]
"""Computes the reward of a response; the reward client's method."""


class EvaluationResult:
    """The result of one evaluation."""

    def __init__(self, version: Version, rewards: list[float], threshold: float, failed: int, tokens: int) -> None:
        self.version = version
        self.count = len(rewards)
        self.failed = failed
        self.accuracy = sum(reward >= threshold for reward in rewards) / max(1, self.count)
        self.reward = sum(rewards) / max(1, self.count)
        self.mean_tokens = tokens / max(1, self.count)


@dataclass(slots=True)
class _Running:
    version: Version
    lease: Lease
    responses: dict[TrajectoryId, array[int]]
    submitted: bool = False
    rewards: list[float] = field(default_factory=list)
    failed: int = 0
    tokens: int = 0
    sessions: EvaluationSessions | None = None


class EvaluationClient:
    """The evaluations of one run."""

    def __init__(
        self,
        problems: Sequence[tuple[Problem, tuple[int, ...]]],
        sampling: Sampling,
        *,
        every: int,
        last: Version | None,
        samples: int,
        threshold: float,
        store: WeightStore,
        processes: ProcessManager,
        score: Score,
        on_result: Callable[[EvaluationResult], None],
        sessions: Callable[..., EvaluationSessions] | None = None,
    ) -> None:
        """With an environment, `sessions` creates the sessions of one attempt at an evaluation."""
        self._problems = problems
        self._sampling = sampling
        self._every = every
        self._last = last
        self._samples = samples
        self._threshold = threshold
        self._store = store
        self._processes = processes
        self._score_response = score
        self._on_result = on_result
        self._make_sessions = sessions
        self._attempts = 0
        self._waiting: deque[tuple[Version, Lease]] = deque()
        self._running: _Running | None = None
        self._worker: WorkerProcess | None = None
        self._joined = False
        self._given_up = False
        self._progress_at = 0.0
        """When an evaluation last made progress; an engine that restarts again and again makes none."""

    @property
    def pending(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def version_published(self, version: Version) -> None:
        """Evaluate the version, if that is due."""
        if self.is_due(version):
            self.evaluate(version)

    def is_due(self, version: Version) -> bool:
        """Whether a version is evaluated when it is published."""
        return not self._given_up and (version % self._every == 0 or version == self._last)

    def evaluate(self, version: Version) -> None:
        """Evaluate a version after those that were requested before it."""
        if self._given_up:
            return
        if not self.pending:
            self._progress_at = time.monotonic()
        self._waiting.append((version, self._store.lease(version)))
        if self._worker is None:
            self._worker = self._processes.start("instance", "evaluator")
        self._start_next()

    def owns(self, worker: WorkerProcess) -> bool:
        return worker is self._worker

    def lost(self, worker: WorkerProcess, reason: str, *, restarts: bool) -> None:  # noqa: ARG002
        """The evaluation that ran starts over with the next incarnation, if there is one."""
        self._joined = False
        running, self._running = self._running, None
        if running is not None:
            if running.sessions is not None:
                running.sessions.end()
            self._waiting.appendleft((running.version, running.lease))
        if not restarts:
            self._give_up()

    def give_up_if_stuck(self, patience: float) -> tuple[str, str] | None:
        """Remove an evaluator that made no progress for so long; its name and the reason, or None."""
        worker = self._worker
        if worker is None or not self.pending or time.monotonic() <= self._progress_at + patience:
            return None
        waits = worker.handle is not None and worker.handle.pending
        reason = "there was no room for it" if waits else "it made no progress"
        self._processes.remove(worker)
        self.lost(worker, reason, restarts=False)
        return worker.name, f"{reason} for {patience:g} s (deadlines.load and deadlines.train)"

    def _give_up(self) -> None:
        self._given_up = True
        for _, lease in self._waiting:
            lease.close()
        self._waiting.clear()

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:  # noqa: ARG002
        if isinstance(message, m.RolloutReady):
            self._joined = True
            self._start_next()
        running = self._running
        if not isinstance(message, m.RolloutReport) or running is None:
            return
        if message.chunks:
            self._progress_at = time.monotonic()
        if running.sessions is not None:
            running.sessions.receive(message)
            return
        for chunk in message.chunks:
            running.responses[chunk.trajectory].frombytes(chunk.token_data)
        for event in message.events:
            match event:
                case e.SlotLoaded() if not running.submitted:
                    self._submit(running)
                case e.SlotLoadFailed(differs=True):
                    raise IntegrityError(event.reason)
                case e.SlotLoadFailed():
                    running.failed = len(running.responses)
                    self._end(running)
                case e.Generated(trajectory=trajectory):
                    self._score(running, trajectory)
                case e.TrajectoryFailed():
                    self._scored(running, None)
                case _:
                    pass

    def _start_next(self) -> None:
        if self._running is not None or not self._waiting or not self._joined:
            return
        assert self._worker is not None
        version, lease = self._waiting.popleft()
        count = len(self._problems) * self._samples
        first = first_trajectory(version, count)
        trajectories = range(first, first + count)
        self._running = _Running(version, lease, {trajectory: array("i") for trajectory in trajectories})
        self._worker.send(m.RunCommand(command=c.LoadVersion(slot=SlotId(self._worker.name, 0), version=version)))

    def _submit(self, running: _Running) -> None:
        assert self._worker is not None
        running.submitted = True
        if self._make_sessions is not None:
            self._start_sessions(running, self._worker)
            return
        requests = tuple(
            Request(
                trajectory=trajectory,
                version=running.version,
                prompt=self._problems[number // self._samples][1],
                sampling=self._sampling,
            )
            for number, trajectory in enumerate(running.responses)
        )
        self._worker.send(m.SubmitRequests(slot=0, requests=requests))

    def _start_sessions(self, running: _Running, worker: WorkerProcess) -> None:
        """Play the prompts through the environment, one turn at a time."""
        assert self._make_sessions is not None
        self._attempts += 1
        prompts = [
            (trajectory, *self._problems[number // self._samples])
            for number, trajectory in enumerate(running.responses)
        ]

        def scored(reward: float | None, tokens: int) -> None:
            running.tokens += tokens
            self._scored(running, reward)

        running.sessions = self._make_sessions(prompts, running.version, self._attempts, worker, self._sampling, scored)
        running.sessions.start()

    def _score(self, running: _Running, trajectory: TrajectoryId) -> None:
        number = trajectory - next(iter(running.responses))
        response = running.responses[trajectory]
        running.tokens += len(response)
        problem = self._problems[number // self._samples][0]

        def on_reply(reply: m.ScoreResult | m.EnvResult) -> None:
            self._scored(running, reply.reward if isinstance(reply, m.ScoreResult) else None)

        self._score_response(problem, tuple(response), on_reply)

    def _scored(self, running: _Running, reward: float | None) -> None:
        if running is not self._running:
            return
        self._progress_at = time.monotonic()
        running.rewards.append(0.0 if reward is None else reward)
        running.failed += reward is None
        if len(running.rewards) == len(running.responses):
            self._end(running)

    def _end(self, running: _Running) -> None:
        running.lease.close()
        if running.sessions is not None:
            running.sessions.end()
        self._running = None
        self._on_result(
            EvaluationResult(running.version, running.rewards, self._threshold, running.failed, running.tokens)
        )
        self._start_next()
