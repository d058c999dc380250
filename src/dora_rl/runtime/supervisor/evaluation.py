"""Evaluation on held-out prompts, beside training: an engine of its own that no decision of the orchestrator sees.

Invariants:
- an evaluation is of one version, whose weights are held until it is over;
- it takes no request off rollout and no weights from it; what it costs is the time of the cores it shares;
- once there will be no engine for it any more, nothing is pending and nothing is held: no run waits for it then.
"""

from __future__ import annotations

import json
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import IntegrityError, UserError
from dora_rl.core.types import SlotId, TrajectoryId, Version
from dora_rl.engine.requests import Request, Sampling
from dora_rl.envs.data import Dataset, Problem, load
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.reward_client import RewardClient
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.supervisor.evaluation_sessions import EvaluationSessions
    from dora_rl.weights.store import Lease, WeightStore

_FIRST = 1 << 48
"""Trajectories of evaluations are numbered from here: no run reaches it, so they draw other random numbers."""


def first_trajectory(version: Version, count: int) -> TrajectoryId:
    """The evaluation of a version has `count` trajectories from here on, no other one's."""
    return _FIRST + version * count


def evaluated(metrics: Path) -> set[Version]:
    """Versions whose evaluation is over, from what a run has written down."""
    if not metrics.exists():
        return set()
    records = [json.loads(line) for line in metrics.read_bytes().splitlines() if line.startswith(b'{"evaluation"')]
    return {record["evaluation"] for record in records}


def held_out_problems(config: RunConfig, base: Path, dataset: Dataset | None = None) -> Sequence[Problem]:
    """The problems that evaluations ask; `dataset` is the run's own, if it is read already."""
    if config.evaluation.data is not None:
        problems = load(config.evaluation.data, base).train
    else:
        problems = (dataset or load(config.data, base)).held_out
    if not problems:
        raise UserError("there are no held-out prompts: set data.held_out, or evaluation.data to a source of its own")
    return problems


class Evaluated:
    """The result of one evaluation."""

    def __init__(self, version: Version, rewards: list[float], right: float, failed: int, tokens: int) -> None:
        self.version = version
        self.count = len(rewards)
        self.failed = failed
        self.accuracy = sum(reward >= right for reward in rewards) / max(1, self.count)
        self.reward = sum(rewards) / max(1, self.count)
        self.mean_tokens = tokens / max(1, self.count)


@dataclass(slots=True)
class _Running:
    version: Version
    lease: Lease
    responses: dict[TrajectoryId, array[int]]
    begun: bool = False
    rewards: list[float] = field(default_factory=list)
    failed: int = 0
    tokens: int = 0
    turns: EvaluationSessions | None = None


class Evaluation:
    """Evaluations of one run, one at a time."""

    def __init__(
        self,
        problems: Sequence[tuple[Problem, tuple[int, ...]]],
        sampling: Sampling,
        samples: int,
        right: float,
        timeout: float,
        store: WeightStore,
        decode: Callable[[Sequence[int]], str],
        done: Callable[[Evaluated], None],
        turns: Callable[..., EvaluationSessions] | None = None,
    ) -> None:
        """With an environment, `turns` makes the turns of one attempt at an evaluation."""
        self._problems = problems
        self._sampling = sampling
        self._samples = samples
        self._right = right
        self._timeout = timeout
        self._store = store
        self._decode = decode
        self._done = done
        self._make_turns = turns
        self._attempts = 0
        self._waiting: deque[tuple[Version, Lease]] = deque()
        self._now: _Running | None = None
        self._process: WorkerProcess | None = None
        self._joined = False
        self._gone = False
        """There will be no engine."""
        self._moved = 0.0
        """When it last got anywhere: an engine that comes up again and again does not."""

    @property
    def pending(self) -> int:
        return len(self._waiting) + (self._now is not None)

    def ask(self, version: Version, processes: ProcessManager) -> None:
        """Evaluate a version as soon as those before it are done."""
        if self._gone:
            return
        if not self.pending:
            self._moved = time.monotonic()
        self._waiting.append((version, self._store.lease(version)))
        if self._process is None:
            self._process = processes.start("instance", "evaluator")
        self._next()

    def owns(self, process: WorkerProcess) -> bool:
        return process is self._process

    def lost(self) -> None:
        """The engine died; the evaluation begins anew with the next one."""
        self._joined = False
        if self._now is not None:
            if self._now.turns is not None:
                self._now.turns.end()
            self._waiting.appendleft((self._now.version, self._now.lease))
            self._now = None

    def overdue(self, seconds: float) -> WorkerProcess | None:
        """The engine, if it is waited for and has got nowhere for so long: it waits for room, or hangs."""
        return self._process if self.pending and time.monotonic() > self._moved + seconds else None

    def give_up(self) -> None:
        """There will be no engine: let go of all."""
        self._gone = True
        self.lost()
        for _, lease in self._waiting:
            lease.close()
        self._waiting.clear()

    def hear(self, message: m.FromWorker, judges: RewardClient) -> None:
        """What the engine says."""
        if isinstance(message, m.RolloutReady):
            self._joined = True
            self._next()
        running = self._now
        if not isinstance(message, m.Report) or running is None:
            return
        if message.said:
            self._moved = time.monotonic()
        if running.turns is not None:
            running.turns.hear(message)
            return
        for said in message.said:
            running.responses[said.trajectory].frombytes(said.tokens)
        for event in message.events:
            match event:
                case e.SlotLoaded() if not running.begun:
                    self._submit(running)
                case e.SlotLoadFailed(differs=True):
                    raise IntegrityError(event.reason)
                case e.SlotLoadFailed():
                    running.failed = len(running.responses)
                    self._end(running)
                case e.Generated(trajectory=trajectory):
                    self._judge(running, trajectory, judges)
                case e.TrajectoryFailed():
                    self._score(running, None)
                case _:
                    pass

    def _next(self) -> None:
        if self._now is not None or not self._waiting or not self._joined:
            return
        assert self._process is not None
        version, lease = self._waiting.popleft()
        count = len(self._problems) * self._samples
        first = first_trajectory(version, count)
        trajectories = range(first, first + count)
        self._now = _Running(version, lease, {trajectory: array("i") for trajectory in trajectories})
        self._process.send(m.RunCommand(command=c.LoadVersion(slot=SlotId(self._process.name, 0), version=version)))

    def _submit(self, running: _Running) -> None:
        assert self._process is not None
        running.begun = True
        if self._make_turns is not None:
            self._play(running)
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
        self._process.send(m.SubmitRequests(slot=0, requests=requests))

    def _play(self, running: _Running) -> None:
        """Through the environment, a turn at a time."""
        assert self._make_turns is not None
        assert self._process is not None
        process = self._process
        self._attempts += 1
        asked = [
            (trajectory, *self._problems[number // self._samples])
            for number, trajectory in enumerate(running.responses)
        ]

        def submit(trajectory: TrajectoryId, prompt: tuple[int, ...], response: tuple[int, ...]) -> None:
            request = Request(
                trajectory=trajectory,
                version=running.version,
                prompt=prompt,
                response=response,
                sampling=self._sampling,
                parks=True,
            )
            process.send(m.SubmitRequests(slot=0, requests=(request,)))

        def score(reward: float | None, tokens: int) -> None:
            running.tokens += tokens
            self._score(running, reward)

        running.turns = self._make_turns(asked, running.version, self._attempts, process, submit, score)
        running.turns.begin()

    def _judge(self, running: _Running, trajectory: TrajectoryId, judges: RewardClient) -> None:
        number = trajectory - next(iter(running.responses))
        response = running.responses[trajectory]
        running.tokens += len(response)
        problem = self._problems[number // self._samples][0]
        tokens = tuple(response)
        question = m.ScoreRequest(item=0, problem=problem, completion=self._decode(tokens), tokens=tokens)
        judges.ask(question, lambda verdict: self._score(running, _reward(verdict)), self._timeout)

    def _score(self, running: _Running, reward: float | None) -> None:
        if running is not self._now:
            return
        self._moved = time.monotonic()
        running.rewards.append(0.0 if reward is None else reward)
        running.failed += reward is None
        if len(running.rewards) == len(running.responses):
            self._end(running)

    def _end(self, running: _Running) -> None:
        running.lease.close()
        if running.turns is not None:
            running.turns.end()
        self._now = None
        self._done(Evaluated(running.version, running.rewards, self._right, running.failed, running.tokens))
        self._next()


def _reward(verdict: m.ScoreResult | m.EnvResult) -> float | None:
    return verdict.reward if isinstance(verdict, m.ScoreResult) else None
