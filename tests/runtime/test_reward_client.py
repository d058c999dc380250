"""Who is asked what, without processes: sessions stay where they are, nobody is blamed for a neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.reward_client import RewardPool, RewardReply
from dora_rl.runtime.transport import messages as m

if TYPE_CHECKING:
    import pytest


class Worker:
    """A process that remembers what it was asked."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.failures = 0
        self.asked: list[m.EnvRequest] = []

    def send(self, message: m.EnvRequest) -> None:
        self.asked.append(message)

    def succeeded(self) -> None:
        self.failures = 0


class Pool:
    """Workers, judges over them, and what was answered."""

    def __init__(self, count: int, concurrency: int) -> None:
        self.workers: list[Any] = []
        self.pool = RewardPool(self, count, concurrency)  # type: ignore[arg-type]
        self.answers: dict[int, RewardReply] = {}
        for worker in self.workers:
            self.pool.ready(worker)

    def start(self, _role: str, worker_id: str) -> Worker:
        self.workers.append(Worker(worker_id))
        return self.workers[-1]  # type: ignore[no-any-return]

    def ask(self, session: int, timeout: float = 100.0) -> None:
        question = m.EnvRequest(
            item=0, session=session, problem=Problem(key="", prompt=""), texts=(), tokens=(), finish=False
        )
        self.pool.request(question, lambda reply: self.answers.update({session: reply}), timeout, session)

    def reply(self, worker: Any, *, done: bool = False) -> None:
        """To the oldest question."""
        self.pool.replied(worker, m.EnvResult(item=worker.asked.pop(0).item, observation="x", done=done))

    def die(self, worker: Any) -> None:
        worker.asked.clear()
        self.pool.worker_lost(worker)
        self.pool.ready(worker)

    def sessions(self, worker: Any) -> list[int]:
        return [message.session for message in worker.asked]


def test_sessions_are_spread_and_stay() -> None:
    pool = Pool(3, concurrency=4)
    for session in range(6):
        pool.ask(session)
    assert sorted(len(worker.asked) for worker in pool.workers) == [2, 2, 2]
    homes = {session: worker for worker in pool.workers for session in pool.sessions(worker)}
    for worker in pool.workers:
        while worker.asked:
            pool.reply(worker)
    for session in (0, 1, 2, 3, 4, 5):
        pool.ask(session)
        assert session in pool.sessions(homes[session])


def test_no_worker_is_asked_more_at_once_than_it_may() -> None:
    pool = Pool(2, concurrency=3)
    for session in range(20):
        pool.ask(session)
        assert all(len(worker.asked) <= 3 for worker in pool.workers)
    while any(worker.asked for worker in pool.workers):
        for worker in pool.workers:
            if worker.asked:
                pool.reply(worker)
                assert len(worker.asked) <= 3
    assert len(pool.answers) == 20
    assert pool.pool.pending == 0


def test_after_a_death_each_is_asked_alone_and_only_the_guilty_fails() -> None:
    pool = Pool(1, concurrency=4)
    (worker,) = pool.workers
    for session in range(4):
        pool.ask(session)
    pool.die(worker)
    while pool.pool.pending:
        assert len(worker.asked) == 1
        if worker.asked[0].session == 2:
            pool.die(worker)
        else:
            pool.reply(worker)
    assert {session for session, reply in pool.answers.items() if reply.failed} == {2}


def test_those_beside_one_that_hangs_are_not_blamed_however_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dora_rl.runtime.supervisor.reward_client.time.monotonic", lambda: now)
    pool = Pool(1, concurrency=2)
    (worker,) = pool.workers
    pool.ask(0, timeout=1000.0)
    for hanging in range(1, 6):
        pool.ask(hanging, timeout=1.0)
        assert sorted(pool.sessions(worker)) == [0, hanging]
        now += 2.0
        assert pool.pool.overdue() == [worker]
        pool.die(worker)
    pool.reply(worker)
    assert pool.answers[0].failed is None
    assert all("longer than" in (pool.answers[hanging].failed or "") for hanging in range(1, 6))


def test_nobody_new_is_asked_beside_a_question_that_is_asked_again() -> None:
    pool = Pool(1, concurrency=4)
    (worker,) = pool.workers
    pool.ask(0)
    pool.die(worker)
    pool.ask(1)
    assert pool.sessions(worker) == [0]
    pool.reply(worker)
    assert pool.sessions(worker) == [1]
    pool.ask(2)  # once it is answered, several are asked at once again
    assert pool.sessions(worker) == [1, 2]
