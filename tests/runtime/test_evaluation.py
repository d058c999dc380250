"""Evaluations that can't be: without an engine nothing is pending, and no weights are held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.types import InstanceSpec
from dora_rl.engine.requests import Sampling
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.evaluation_client import EvaluationClient, EvaluationResult
from dora_rl.runtime.transport import messages as m
from tests.runtime.test_supervisor import Stage

EVALUATION = "dora_rl.runtime.supervisor.evaluation_client"


class Store:
    """Counts who holds weights."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def lease(self, version: int) -> Any:
        self.held.append(version)
        return SimpleNamespace(close=lambda: self.held.remove(version))


def evaluation(store: Any, stage: Stage) -> EvaluationClient:
    def on_result(_: EvaluationResult) -> None: ...

    processes: Any = stage
    return EvaluationClient(
        [(Problem(key="", prompt=""), (1,))],
        Sampling(max_tokens=1),
        every=1,
        last=None,
        samples=1,
        threshold=1.0,
        store=store,
        processes=processes,
        score=lambda *_: None,
        on_result=on_result,
    )


def test_an_evaluator_that_was_given_up_evaluates_nothing_more() -> None:
    store, stage = Store(), Stage()
    client = evaluation(store, stage)
    client.evaluate(0)
    assert (client.pending, store.held) == (1, [0])
    client.lost(stage.workers[-1], "it failed too often", restarts=False)
    client.evaluate(1)
    assert (client.pending, store.held) == (0, [])


def test_an_evaluation_starts_over_when_its_worker_is_restarted() -> None:
    store, stage = Store(), Stage()
    client = evaluation(store, stage)
    client.evaluate(0)
    worker = stage.workers[-1]
    spec = InstanceSpec(instance="evaluator.1", max_requests=1, kv_tokens=10)
    client.receive(worker, m.RolloutReady(spec=spec, kernels=""))
    client.lost(worker, "it was killed", restarts=True)
    assert (client.pending, store.held) == (1, [0])


@pytest.mark.parametrize("pending", [True, False])
def test_an_evaluator_without_progress_does_not_keep_a_run_from_ending(
    monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(f"{EVALUATION}.time.monotonic", lambda: now)
    store, stage = Store(), Stage()
    supervisor = stage.supervisor
    supervisor.evaluation = evaluation(store, stage)
    supervisor.evaluation.evaluate(2)
    evaluator = stage.workers[-1]
    evaluator.handle = SimpleNamespace(pending=pending)
    now += supervisor._deadlines.load + supervisor._deadlines.train - 1
    supervisor._maintain()
    assert supervisor.evaluating
    now += 2
    supervisor._maintain()
    assert not supervisor.evaluating
    assert not store.held
    assert evaluator not in stage.workers
    (notice,) = stage.notices
    assert ("no room" in notice) is pending
    supervisor._maintain()  # only once
    assert len(stage.notices) == 1
