"""Logs under TRL's names, averaged between two logs."""

from __future__ import annotations

from typing import Any

import pytest

from dora_rl.trl import GRPOConfig
from dora_rl.trl.history import History, trl_name
from dora_rl.trl.schedule import schedule


def logs(count: int, **settings: Any) -> list[dict[str, float]]:
    """The logs of a run of `count` steps whose reward is the number of the step."""
    args = GRPOConfig(**settings)
    history = History(args, schedule(args, 20, 1))
    made = (history.add(step, {"reward/mean": float(step), "learning_rate": 1.0 / (step + 1)}) for step in range(count))
    return [log for log in made if log is not None]


def test_metrics_have_the_names_of_trl() -> None:
    assert trl_name("reward/mean") == "reward"
    assert trl_name("reward/correct/mean") == "rewards/correct/mean"
    assert trl_name("reward/max") == "reward/max"
    assert trl_name("response_length/truncated") == "completions/clipped_ratio"
    assert trl_name("eval/held_out/reward") == "eval_reward"
    assert trl_name("entropy") == "entropy"


def test_logs_are_means_since_the_last_one() -> None:
    found = logs(7, logging_steps=3)
    assert [(log["step"], log["reward"]) for log in found] == [(3, 1.0), (6, 4.0)]
    assert [log["learning_rate"] for log in found] == [pytest.approx(1 / 3), pytest.approx(1 / 6)]  # as it is now
    assert found[0]["epoch"] == pytest.approx(3 / 20)


def test_when_logs_are_due() -> None:
    assert [log["step"] for log in logs(6, logging_steps=3, logging_first_step=True)] == [1, 3, 6]
    assert [log["step"] for log in logs(20, logging_steps=0.1)] == [6, 12, 18]  # a tenth of 60 updates
    assert logs(20, logging_strategy="no", logging_first_step=True) == []
    # Two updates in a step: a log is due after the step that has the update.
    assert [log["step"] for log in logs(5, logging_steps=3, num_iterations=2)] == [4, 6, 10]


def test_a_callback_can_ask_for_a_log() -> None:
    args = GRPOConfig()
    history = History(args, schedule(args, 20, 1))
    assert history.add(0, {"loss": 1.0}) is None
    asked = history.add(1, {"loss": 2.0}, asked=True)
    assert asked is not None
    assert (asked["loss"], asked["step"]) == (1.5, 2.0)
