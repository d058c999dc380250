"""Evaluations that can't be: without an engine nothing is pending, and no weights are held."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.engine.requests import Sampling
from dora_rl.envs.data import Problem
from dora_rl.runtime.supervisor.evaluation import Evaluated, Evaluation
from tests.runtime.test_supervisor import Stage

EVALUATION = "dora_rl.runtime.supervisor.evaluation"


class Store:
    """Counts who holds weights."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def lease(self, version: int) -> Any:
        self.held.append(version)
        return SimpleNamespace(close=lambda: self.held.remove(version))


def evaluation(store: Any) -> Evaluation:
    def done(_: Evaluated) -> None: ...

    problems = [(Problem(key="", prompt=""), (1,))]
    return Evaluation(problems, Sampling(max_tokens=1), 1, 1.0, 1.0, store, str, done)


def test_what_was_given_up_is_not_asked_again() -> None:
    store, stage = Store(), Stage()
    made = evaluation(store)
    made.ask(0, stage)  # type: ignore[arg-type]
    assert (made.pending, store.held) == (1, [0])
    made.give_up()
    made.ask(1, stage)  # type: ignore[arg-type]
    assert (made.pending, store.held) == (0, [])


@pytest.mark.parametrize("pending", [True, False])
def test_an_evaluator_that_gets_nowhere_does_not_keep_a_run_from_ending(
    monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    now = 0.0
    monkeypatch.setattr(f"{EVALUATION}.time.monotonic", lambda: now)
    store, stage = Store(), Stage()
    made = evaluation(store)
    stage.world.evaluate_with(made)
    made.ask(2, stage)  # type: ignore[arg-type]
    evaluator = stage.workers[-1]
    evaluator.handle = SimpleNamespace(pending=pending)
    deadline = stage.world._deadlines.load + stage.world._deadlines.train
    now += deadline - 1
    stage.world._look()
    assert stage.world.evaluating
    now += 2
    stage.world._look()
    assert not stage.world.evaluating
    assert not store.held
    assert evaluator not in stage.workers
    (said,) = stage.notices
    assert ("no room" in said) is pending
    stage.world._look()  # once
    assert len(stage.notices) == 1
