"""Which reward worker receives which request, tested without processes.

Sessions stay on their worker, and a request does not fail because of another one on the same worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.reward_client import RewardPool, RewardReply
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    import pytest


class Worker:
    """A reward worker that keeps the requests that it has received."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.failures = 0
        self.received: list[m.EnvRequest] = []

    def send(self, message: m.EnvRequest) -> None:
        self.received.append(message)

    def succeeded(self) -> None:
        self.failures = 0


class Pool:
    """A `RewardPool` over such workers, with the replies by session. It also starts the workers for the pool."""

    def __init__(self, count: int, concurrency: int) -> None:
        self.workers: list[Any] = []
        self.pool = RewardPool(self, count, concurrency)  # type: ignore[arg-type]
        self.replies: dict[int, RewardReply] = {}
        for worker in self.workers:
            self.pool.ready(worker)

    def start(self, _role: str, worker_id: str) -> Worker:
        self.workers.append(Worker(worker_id))
        return self.workers[-1]  # type: ignore[no-any-return]

    def request(self, session: int, timeout: float = 100.0) -> None:
        request = m.EnvRequest(
            item=0, session=session, problem=Problem(key="", prompt=""), texts=(), tokens=(), finish=False
        )
        self.pool.request(request, lambda reply: self.replies.update({session: reply}), timeout, session)

    def reply(self, worker: Any, *, done: bool = False) -> None:
        """Reply to the oldest request of a worker."""
        self.pool.replied(worker, m.EnvResult(item=worker.received.pop(0).item, observation="x", done=done))

    def die(self, worker: Any) -> None:
        """Lose a worker and start it again."""
        worker.received.clear()
        self.pool.worker_lost(worker)
        self.pool.ready(worker)

    def sessions(self, worker: Any) -> list[int]:
        return [message.session for message in worker.received]


def test_sessions_are_distributed_and_stay_on_their_worker() -> None:
    pool = Pool(3, concurrency=4)
    for session in range(6):
        pool.request(session)
    assert sorted(len(worker.received) for worker in pool.workers) == [2, 2, 2]
    workers = {session: worker for worker in pool.workers for session in pool.sessions(worker)}
    for worker in pool.workers:
        while worker.received:
            pool.reply(worker)
    for session in (0, 1, 2, 3, 4, 5):
        pool.request(session)
        assert session in pool.sessions(workers[session])


def test_no_worker_has_more_requests_than_its_concurrency() -> None:
    pool = Pool(2, concurrency=3)
    for session in range(20):
        pool.request(session)
        assert all(len(worker.received) <= 3 for worker in pool.workers)
    while any(worker.received for worker in pool.workers):
        for worker in pool.workers:
            if worker.received:
                pool.reply(worker)
                assert len(worker.received) <= 3
    assert len(pool.replies) == 20
    assert pool.pool.pending == 0


def test_after_a_worker_is_lost_requests_are_repeated_singly_and_only_the_cause_fails() -> None:
    pool = Pool(1, concurrency=4)
    (worker,) = pool.workers
    for session in range(4):
        pool.request(session)
    pool.die(worker)
    while pool.pool.pending:
        assert len(worker.received) == 1
        if worker.received[0].session == 2:
            pool.die(worker)
        else:
            pool.reply(worker)
    assert {session for session, reply in pool.replies.items() if reply.failed} == {2}


def test_requests_beside_ones_that_hang_do_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dora_rl.runtime.supervisor.reward_client.time.monotonic", lambda: now)
    pool = Pool(1, concurrency=2)
    (worker,) = pool.workers
    pool.request(0, timeout=1000.0)
    for hanging in range(1, 6):
        pool.request(hanging, timeout=1.0)
        assert sorted(pool.sessions(worker)) == [0, hanging]
        now += 2.0
        assert pool.pool.overdue() == [worker]
        pool.die(worker)
    pool.reply(worker)
    assert pool.replies[0].failed is None
    assert all("longer than" in (pool.replies[hanging].failed or "") for hanging in range(1, 6))


def test_no_other_request_is_sent_beside_a_repeated_one() -> None:
    pool = Pool(1, concurrency=4)
    (worker,) = pool.workers
    pool.request(0)
    pool.die(worker)
    pool.request(1)
    assert pool.sessions(worker) == [0]
    pool.reply(worker)
    assert pool.sessions(worker) == [1]
    pool.request(2)  # after the reply, several requests are sent at once again
    assert pool.sessions(worker) == [1, 2]
