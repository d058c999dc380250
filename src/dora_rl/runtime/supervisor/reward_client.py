"""The supervisor's side of the reward workers: a pool that scores responses and steps environments.

Each worker handles a limited number of requests at a time, and each request has a deadline.

    Score -> ScoreRequest -> ScoreResult -> Scored, or TrajectoryFailed
    EnvRequest -> EnvResult, for the sessions of `env_sessions` and of evaluations

Invariants:
- every request is answered once: by a result, or by a failure if its worker hung on it, or died on it twice;
- a worker that dies while it handles a request dies of the request: that never counts against the process;
- a worker that hangs is killed; the others go on, and its other requests go to another worker;
- a request is retried alone, so if the worker dies again, the request is to blame;
- all requests of a session go to the worker that has the session, until that worker is lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import TrajectoryId
from dora_rl.envs.data import Problem
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.reward_guard import RewardGuard
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.supervisor.client import Hooks
    from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore
    from dora_rl.runtime.tokenization import Tokenization

_TRIES = 2
RewardRequest = m.ScoreRequest | m.EnvRequest
RewardReply = m.ScoreResult | m.EnvResult
OnReply = Callable[[RewardReply], None]


@dataclass(slots=True)
class _Pending:
    message: RewardRequest
    on_reply: OnReply
    timeout: float
    session: int | None
    tries: int = 0
    due: float = 0.0

    @property
    def item(self) -> int:
        return self.message.item

    @property
    def kind(self) -> str:
        return "reward" if isinstance(self.message, m.ScoreRequest) else "environment"


class RewardPool:
    """The requests to all reward workers of a run."""

    def __init__(self, processes: ProcessManager, count: int, concurrency: int = 1) -> None:
        started = [processes.start("reward", f"reward{number}") for number in range(count)]
        self.workers = {worker.worker_id: worker for worker in started}
        self._concurrency = concurrency
        self._ready: set[str] = set()
        self._waiting: deque[_Pending] = deque()
        self._sent: dict[str, dict[int, _Pending]] = {worker_id: {} for worker_id in self.workers}
        """Requests that each worker handles, by their number."""
        self._homes: dict[int, str] = {}
        """The worker that has a session."""
        self._sessions: Counter[str] = Counter()
        """Number of sessions of each worker."""
        self._item = 0
        self._retries: Counter[str] = Counter()
        """Requests that each worker handles for the second time."""
        self._first_due = math.inf
        """No deadline is before this."""
        self._guard = RewardGuard()

    def request(self, message: RewardRequest, on_reply: OnReply, timeout: float, session: int | None = None) -> None:
        """Send a request as soon as a worker has room; `on_reply` is called with the answer."""
        self._item += 1
        numbered = msgspec.structs.replace(message, item=self._item)
        self._waiting.append(_Pending(numbered, on_reply, timeout, session))
        self._dispatch()

    def close_session(self, session: int) -> None:
        """Close a session whose final reward is not needed."""
        home = self._homes.get(session)
        if home is not None:
            self._forget(session)
            self.workers[home].send(m.CloseSession(session=session))

    @property
    def pending(self) -> int:
        return len(self._waiting) + sum(map(len, self._sent.values()))

    def handling(self, worker: WorkerProcess) -> bool:
        """Whether the worker handles a request now."""
        return bool(self._sent[worker.worker_id])

    def ready(self, worker: WorkerProcess) -> None:
        self._ready.add(worker.worker_id)
        self._dispatch()

    def replied(self, worker: WorkerProcess, reply: RewardReply) -> None:
        pending = self._sent[worker.worker_id].pop(reply.item, None)
        if pending is not None:
            self._retries[worker.worker_id] -= pending.tries > 1
            worker.succeeded()
            self._guard.answered(pending.item, reply.failed)
            self._answer(pending, reply)
        self._dispatch()

    def worker_lost(self, worker: WorkerProcess) -> None:
        """A worker has died: its requests are retried once, then they fail."""
        self._ready.discard(worker.worker_id)
        for session in [session for session, home in self._homes.items() if home == worker.worker_id]:
            self._forget(session)
        sent = self._sent[worker.worker_id]
        for pending in reversed(sent.values()):
            if pending.tries < _TRIES:
                self._waiting.appendleft(pending)
        blamed = [pending for pending in sent.values() if pending.tries >= _TRIES]
        sent.clear()
        self._retries[worker.worker_id] = 0
        for pending in blamed:
            self._fail(pending, f"the process died in which the {pending.kind} ran")
        self._dispatch()

    def overdue(self) -> list[WorkerProcess]:
        """Workers that hang on a request, which has failed then."""
        now = time.monotonic()
        hung: list[WorkerProcess] = []
        if now < self._first_due:
            return hung
        for worker_id, sent in self._sent.items():
            late = [pending for pending in sent.values() if pending.due <= now]
            if not late:
                continue
            hung.append(self.workers[worker_id])
            self._ready.discard(worker_id)
            for pending in late:
                del sent[pending.item]
                self._fail(pending, f"the {pending.kind} took longer than {pending.timeout:g} s", late=True)
            for pending in sent.values():  # they are not to blame for the loss of the worker
                pending.tries -= 1
            self._retries[worker_id] = sum(pending.tries > 1 for pending in sent.values())
        self._first_due = min(
            (pending.due for sent in self._sent.values() for pending in sent.values()), default=math.inf
        )
        return hung

    def next_due(self) -> float | None:
        """When `overdue` has to be called next, on the monotonic clock."""
        return None if self._first_due == math.inf else self._first_due

    def _dispatch(self) -> None:
        free = {worker_id for worker_id in self._ready if self._has_room(worker_id)}
        later: deque[_Pending] = deque()
        while self._waiting and free:
            pending = self._waiting.popleft()
            worker_id = self._choose(pending, free)
            if worker_id is None:
                later.append(pending)
                continue
            self._send(pending, worker_id)
            if not self._has_room(worker_id):
                free.discard(worker_id)
        self._waiting.extendleft(reversed(later))

    def _has_room(self, worker_id: str) -> bool:
        return len(self._sent[worker_id]) < self._concurrency and not self._retries[worker_id]

    def _choose(self, pending: _Pending, free: set[str]) -> str | None:
        """The worker that has the session, or the one with the least to do; None if there is no room."""
        home = None if pending.session is None else self._homes.get(pending.session)
        # A retry is handled alone.
        candidates = [worker_id for worker_id in free if not pending.tries or not self._sent[worker_id]]
        if home is not None:
            return home if home in candidates else None
        return min(
            candidates,
            key=lambda worker_id: (len(self._sent[worker_id]), self._sessions[worker_id], worker_id),
            default=None,
        )

    def _send(self, pending: _Pending, worker_id: str) -> None:
        if pending.session is not None and pending.session not in self._homes:
            self._homes[pending.session] = worker_id
            self._sessions[worker_id] += 1
        if not pending.tries:
            self._guard.asked(pending.item, pending.message.problem.key)
        pending.tries += 1
        self._retries[worker_id] += pending.tries > 1
        pending.due = time.monotonic() + pending.timeout
        self._first_due = min(self._first_due, pending.due)
        self._sent[worker_id][pending.item] = pending
        self.workers[worker_id].send(pending.message)

    def _answer(self, pending: _Pending, reply: RewardReply) -> None:
        if pending.session is not None and (isinstance(reply, m.ScoreResult) or reply.failed is not None):
            self._forget(pending.session)  # the session has ended
        pending.on_reply(reply)

    def _forget(self, session: int) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1

    def _fail(self, pending: _Pending, reason: str, *, late: bool = False) -> None:
        self._guard.answered(pending.item, reason, late=late)
        self._answer(pending, m.ScoreResult(item=pending.item, reward=None, components={}, failed=reason))


class RewardClient:
    """The reward workers of a run."""

    commands: ClassVar[tuple[type[c.Command], ...]] = (c.Score,)

    def __init__(
        self,
        config: RunConfig,
        hooks: Hooks,
        processes: ProcessManager,
        trajectories: TrajectoryStore,
        tokenization: Tokenization,
    ) -> None:
        concurrency = config.reward.concurrency if config.environment.kind is None else config.environment.concurrency
        self.pool = RewardPool(processes, config.reward.workers, concurrency)
        self._timeout = config.reward.timeout_seconds
        self._emit = hooks.emit
        self._trajectories = trajectories
        self._decode = tokenization.decode

    def owns(self, worker: WorkerProcess) -> bool:
        return worker.role == "reward"

    def execute(self, command: c.Command) -> None:
        assert isinstance(command, c.Score)
        trajectory = command.trajectory
        problem = self._trajectories.group_of(trajectory).problem
        tokens = tuple(self._trajectories.trajectory(trajectory).response)
        self.score(problem, tokens, lambda result: self.emit_score(trajectory, result))

    def score(self, problem: Problem, tokens: tuple[int, ...], on_result: OnReply) -> None:
        """Compute the reward of a response."""
        request = m.ScoreRequest(item=0, problem=problem, completion=self._decode(tokens), tokens=tokens)
        self.pool.request(request, on_result, self._timeout)

    def emit_score(self, trajectory: TrajectoryId, result: RewardReply) -> None:
        """Report the reward of a trajectory, or its failure."""
        if isinstance(result, m.EnvResult) or result.reward is None:
            self._emit(e.TrajectoryFailed(trajectory=trajectory, reason=result.failed or "no reward was returned"))
        else:
            self._emit(
                e.Scored(trajectory=trajectory, reward=result.reward, components=result.components, notes=result.notes)
            )

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        match message:
            case m.WorkerReady():
                self.pool.ready(worker)
            case m.ScoreResult() | m.EnvResult():
                self.pool.replied(worker, message)
            case m.Heartbeat():
                pass  # receiving it was enough
            case _:
                raise AssertionError(f"not a message of a reward worker: {message}")

    def lost(self, worker: WorkerProcess, reason: str, *, restarts: bool) -> None:  # noqa: ARG002
        self.pool.worker_lost(worker)
