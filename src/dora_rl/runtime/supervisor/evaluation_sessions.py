"""Held-out prompts that are played through an environment: the turns of one evaluation, on the evaluator's engine.

The turns are those of training (`turns.Turns`), with books that nobody resumes from: an evaluation that is cut short
begins anew. Environments are asked in the judges' processes, so their deadlines are kept from outside.

Invariants:
- no more sessions are open at once than the engine has room for requests;
- sessions have numbers that no trajectory of training and no other attempt at an evaluation has;
- what is answered to an evaluation that is over changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import SlotId, TrajectoryId, Version
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.env_sessions import EnvSessions
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry, TrajectoryEntry
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.launch.process_manager import WorkerProcess
    from dora_rl.runtime.supervisor.reward_client import RewardClient
    from dora_rl.runtime.tokenization import Tokenization

SESSIONS = 1 << 56
"""Sessions of one attempt at an evaluation are numbered from a multiple of this."""
Asked = tuple[TrajectoryId, Problem, tuple[int, ...]]
"""A trajectory, its problem and the tokens of its prompt."""
Score = Callable[[float | None, int], None]
"""Takes a reward, None for a `failed` verdict, and the tokens of the response."""


class EvaluationSessions:
    """The trajectories of one attempt at an evaluation."""

    def __init__(
        self,
        asked: Iterable[Asked],
        version: Version,
        attempt: int,
        process: WorkerProcess,
        submit: Callable[[TrajectoryId, tuple[int, ...], tuple[int, ...]], None],
        score: Score,
        *,
        text: Tokenization,
        judges: RewardClient,
        most_tokens: int,
        most_context: int,
        most_requests: int,
        timeout: float,
    ) -> None:
        self._groups = {
            trajectory: GroupEntry(problem, prompt, problem.key, version, {trajectory: TrajectoryEntry()})
            for trajectory, problem, prompt in asked
        }
        self._slot = SlotId(process.name, 0)
        self._process = process
        self._submit = submit
        self._score = score
        self._waiting = deque(self._groups)
        self._open: set[TrajectoryId] = set()
        self._most = most_requests
        self._over = False
        self._turns = EnvSessions(
            self,
            text,
            judges,
            self,
            lambda _: None if self._over else process,
            self._begin_at_slot,
            self._happen,
            most_tokens,
            most_context,
            timeout,
            first_session=attempt * SESSIONS,
        )

    def begin(self) -> None:
        """Open as many sessions as there is room for."""
        while self._waiting and len(self._open) < self._most:
            trajectory = self._waiting.popleft()
            self._open.add(trajectory)
            self._turns.start(trajectory, self._slot)

    def end(self) -> None:
        """Nobody waits for it any more: close the sessions."""
        self._over = True
        for trajectory in self._open:
            self._turns.failed(trajectory)
        self._open.clear()

    def hear(self, report: m.Report) -> None:
        """What the engine says."""
        for said in report.said:
            chunk = TokenChunk(
                trajectory=said.trajectory,
                version=said.version,
                start=said.start,
                token_data=said.tokens,
                logprob_data=said.logprobs,
            )
            self.trajectory(said.trajectory).take(chunk)
        for end in report.ended:
            self.trajectory(end.trajectory).ended = end.reason
        for event in report.events:
            match event:
                case e.Parked():
                    self._turns.parked(event)
                case e.Generated(trajectory=trajectory):
                    self._turns.score(trajectory, self._judged(trajectory))
                case e.TrajectoryFailed(trajectory=trajectory):
                    self._turns.failed(trajectory)
                    self._close(trajectory, None)
                case _:
                    pass

    # -- books that nobody resumes from -----------------------------------------------------------------------

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None:
        group = None if self._over else self._groups.get(trajectory)
        return None if group is None else group.trajectories[trajectory]

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry:
        return self._groups[trajectory].trajectories[trajectory]

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry:
        return self._groups[trajectory]

    def append_tokens(self, chunks: list[TokenChunk], ended: list[tuple[TrajectoryId, str]]) -> None:
        """Nothing is written down."""

    # -- inside -----------------------------------------------------------------------------------------------

    def _begin_at_slot(self, trajectory: TrajectoryId, _slot: SlotId) -> None:
        if not self._over:
            self._submit(trajectory, self._groups[trajectory].prompt, tuple(self.trajectory(trajectory).response))

    def _happen(self, event: e.Event) -> None:
        if isinstance(event, e.TrajectoryFailed):
            book = self.find(event.trajectory)
            if book is not None:
                self._process.send(
                    m.RunCommand(
                        command=c.Abort(trajectory=event.trajectory, attempt=book.attempt, instance=self._process.name)
                    )
                )
            self._close(event.trajectory, None)

    def _judged(self, trajectory: TrajectoryId) -> Callable[[m.ScoreResult], None]:
        return lambda verdict: self._close(trajectory, verdict.reward)

    def _close(self, trajectory: TrajectoryId, reward: float | None) -> None:
        if self._over or trajectory not in self._open:
            return
        self._open.discard(trajectory)
        book = self.trajectory(trajectory)
        book.failed = reward is None
        self._score(reward, len(book.response))
        self.begin()
