"""The gap of stale trajectories is divided into that of the engine and that of staleness, and training is unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core.trajectory import Group
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.past_versions import most_frequent
from dora_rl.trainer.trainer import Trainer
from tests.trainer import plain
from tests.trainer.factories import groups, llama
from tests.trainer.test_trainer import same, weights

FAST = {"learning_rate": 1e-2}


def measuring(every: int = 1, max_staleness: int = 2, **settings: Any) -> Trainer:
    config = TrainerConfig.model_validate({"measure_gap_every": every, "optimiser": FAST} | settings)
    return Trainer(llama(), config, max_staleness=max_staleness)


def stepped(made: Trainer, batch: list[Group]) -> dict[str, float]:
    step = made.version
    made.accumulate(step, batch)
    return made.apply(step).metrics


def kl(of: torch.Tensor, to: torch.Tensor) -> float:
    return float(((to - of).exp() - (to - of) - 1).mean())


def trained_logprobs(model: Any, batch: list[Group]) -> torch.Tensor:
    trajectories = [t for g in batch for t in g.trajectories]
    with torch.no_grad():
        table, _ = plain.padded_logprobs(model, trajectories)
    return torch.cat([table[row, np.flatnonzero(t.loss_mask)] for row, t in enumerate(trajectories)])


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_both_gaps_are_those_of_the_plain_formula(noise: float) -> None:
    made = measuring()
    stale = groups(model=llama(), noise=noise, seed=7)  # sampled by version 0
    assert "off_policy/engine_kl" not in stepped(made, groups(model=llama())), "nothing is stale in the first step"
    now = llama()
    now.load_state_dict(made.model.state_dict())
    metrics = stepped(made, stale)
    engine = torch.cat([torch.from_numpy(t.behaviour_logprobs[t.loss_mask]) for g in stale for t in g.trajectories])
    before, after = trained_logprobs(llama(), stale), trained_logprobs(now, stale)
    assert metrics["off_policy/engine_kl"] == pytest.approx(kl(engine, before), rel=1e-2, abs=1e-7)
    assert metrics["off_policy/staleness_kl"] == pytest.approx(kl(before, after), rel=1e-2)
    assert metrics["off_policy/staleness_kl"] > 1e-3
    assert metrics["off_policy/gap_staleness"] == 1
    assert (metrics["off_policy/engine_kl"] > 1e-3) == (noise > 0)


@pytest.mark.parametrize(
    "settings",
    [{}, {"epochs": 2}, {"lora": {"rank": 2}}, {"optimiser": FAST | {"offload": True}}],
    ids=["one", "epochs", "lora", "offload"],
)
def test_measuring_changes_no_weight(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    measured = measuring(**settings)
    torch.manual_seed(1)
    plain_one = measuring(every=0, **settings)
    found = []
    for step in range(3):
        batch = groups(model=llama(), seed=step, first=10 * step)  # all of version 0
        found.append("off_policy/engine_kl" in stepped(measured, batch))
        assert "off_policy/engine_kl" not in stepped(plain_one, batch)
        assert same(weights(measured.model), weights(plain_one.model))
    assert found == [False, True, True]


def test_as_many_versions_are_held_as_may_still_be_trained() -> None:
    made = measuring(max_staleness=2)
    held = []
    for step in range(4):
        stepped(made, groups(count=1, model=llama(), seed=step, version=step))
        held.append(set(made._past.versions))
    assert held == [{0}, {0, 1}, {1, 2}, {2, 3}]
    never = measuring(every=0)
    stepped(never, groups(count=1))
    assert not never._past.versions


def test_steps_between_are_not_measured() -> None:
    made = measuring(every=2, max_staleness=9)
    found = [
        "off_policy/engine_kl" in stepped(made, groups(count=1, model=llama(), first=step, version=0))
        for step in range(5)
    ]
    assert found == [False, False, True, False, True]


def test_the_version_of_most_groups_is_measured() -> None:
    of = {
        version: groups(count=count, first=10 * version, version=version)
        for version, count in ((1, 2), (2, 1), (3, 2), (4, 5))
    }
    every = [group for batch in of.values() for group in batch]
    assert most_frequent(every, frozenset({1, 2, 3})) == of[1]
    assert most_frequent(every, frozenset({2, 3})) == of[3]
    assert most_frequent(every, frozenset({9})) == []
