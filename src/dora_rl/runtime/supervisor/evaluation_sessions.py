"""Held-out prompts that are played through an environment: the sessions of one evaluation, on the evaluator.

The sessions are those of training (`env_sessions`), over trajectories that are not recorded: an evaluation that is
interrupted starts over. Environments run in the reward workers, where their deadlines are enforced from outside.

Invariants:
- no more sessions are open at the same time than the engine has room for requests;
- the session numbers differ from those of training and of every other attempt at an evaluation;
- answers to an evaluation that is over change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import GroupId, InstanceId, SlotId, TrajectoryId, Version
from dora_rl.engine.requests import Request, Sampling
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.env_sessions import EnvSessions, SessionLimits
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry, TrajectoryEntry
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.launch.process_manager import WorkerProcess
    from dora_rl.runtime.supervisor.reward_client import RewardPool, RewardReply
    from dora_rl.runtime.tokenization import Tokenization

SESSIONS = 1 << 56
"""The sessions of one attempt at an evaluation are numbered from a multiple of this."""
HeldOutPrompt = tuple[TrajectoryId, Problem, tuple[int, ...]]
"""A trajectory, its problem and the tokens of its prompt."""
Scored = Callable[[float | None, int], None]
"""Receives a reward, None for a failure, and the tokens of the response."""


class EvaluationSessions:
    """The trajectories of one attempt at an evaluation."""

    def __init__(
        self,
        prompts: Iterable[HeldOutPrompt],
        version: Version,
        attempt: int,
        worker: WorkerProcess,
        sampling: Sampling,
        scored: Scored,
        *,
        tokenization: Tokenization,
        pool: RewardPool,
        limits: SessionLimits,
        max_requests: int,
    ) -> None:
        self._groups = {
            trajectory: GroupEntry(problem, prompt, problem.key, version, {trajectory: TrajectoryEntry()})
            for trajectory, problem, prompt in prompts
        }
        self._slot = SlotId(worker.name, 0)
        self._worker = worker
        self._sampling = sampling
        self._scored = scored
        self._waiting = deque(self._groups)
        self._open: set[TrajectoryId] = set()
        self._max_requests = max_requests
        self._over = False
        self._sessions = EnvSessions(
            self,
            tokenization,
            pool,
            self,
            self,
            self._emit,
            limits,
            self._on_score,
            first_session=attempt * SESSIONS,
        )

    def start(self) -> None:
        """Open as many sessions as there is room for."""
        while self._waiting and len(self._open) < self._max_requests:
            trajectory = self._waiting.popleft()
            self._open.add(trajectory)
            self._sessions.start(trajectory, self._slot)

    def end(self) -> None:
        """The evaluation is over or was interrupted: close the sessions."""
        self._over = True
        for trajectory in self._open:
            self._sessions.fail(trajectory)
        self._open.clear()

    def receive(self, report: m.RolloutReport) -> None:
        """Handle a report of the evaluator."""
        for chunk in report.chunks:
            self.trajectory(chunk.trajectory).append(chunk)
        for end in report.ended:
            self.trajectory(end.trajectory).end(end.reason)
        for event in report.events:
            match event:
                case e.Parked():
                    self._sessions.parked(event)
                case e.Generated(trajectory=trajectory):
                    self._sessions.score(trajectory)
                case e.TrajectoryFailed(trajectory=trajectory):
                    self._sessions.fail(trajectory)
                    self._close(trajectory, None)
                case _:
                    pass

    # -- what the sessions need -------------------------------------------------------------------------------

    @property
    def groups(self) -> Mapping[GroupId, GroupEntry]:
        return self._groups

    def find(self, trajectory: TrajectoryId) -> TrajectoryEntry | None:
        group = None if self._over else self._groups.get(trajectory)
        return None if group is None else group.trajectories[trajectory]

    def trajectory(self, trajectory: TrajectoryId) -> TrajectoryEntry:
        return self._groups[trajectory].trajectories[trajectory]

    def group_of(self, trajectory: TrajectoryId) -> GroupEntry:
        return self._groups[trajectory]

    def append_tokens(self, chunks: Sequence[TokenChunk], ended: Sequence[tuple[TrajectoryId, str]]) -> None:
        """Evaluations are not recorded."""

    def resume(self, trajectory: TrajectoryId, slot: SlotId) -> None:
        """Submit a trajectory with its tokens so far."""
        if self._over:
            return
        group = self._groups[trajectory]
        entry = self.trajectory(trajectory)
        request = Request(
            trajectory=trajectory,
            version=group.version,
            prompt=group.prompt,
            response=tuple(entry.response),
            turn_start=entry.turn_start,
            sampling=self._sampling,
            parks=True,
        )
        self._worker.send(m.SubmitRequests(slot=slot.number, requests=(request,)))

    def send(self, instance: InstanceId, message: m.Message) -> bool:  # noqa: ARG002
        """Send to the evaluator."""
        if not self._over:
            self._worker.send(message)
        return not self._over

    # -- inside -----------------------------------------------------------------------------------------------

    def _emit(self, event: e.Event) -> None:
        if isinstance(event, e.TrajectoryFailed):
            entry = self.find(event.trajectory)
            if entry is not None:
                abort = c.Abort(trajectory=event.trajectory, attempt=entry.attempt, instance=self._worker.name)
                self._worker.send(m.RunCommand(command=abort))
            self._close(event.trajectory, None)

    def _on_score(self, trajectory: TrajectoryId, reply: RewardReply) -> None:
        assert isinstance(reply, m.ScoreResult)
        self._close(trajectory, reply.reward)

    def _close(self, trajectory: TrajectoryId, reward: float | None) -> None:
        if self._over or trajectory not in self._open:
            return
        self._open.discard(trajectory)
        entry = self.trajectory(trajectory)
        if reward is None:
            entry.fail()
        self._scored(reward, entry.length)
        self.start()
