"""The effective sample size is that of the trajectories' importance weights, and scales the learning rate if asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.core.trajectory import Group
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.effective_samples import relative_size, weight_sums
from dora_rl.trainer.trainer import Trainer
from tests.trainer import plain
from tests.trainer.factories import groups, llama, trainer
from tests.trainer.test_trainer import even, weights

LOG_WEIGHTS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20)


def size_of(log_weights: list[float]) -> float:
    sums = weight_sums(torch.tensor(log_weights, dtype=torch.float64))
    size = relative_size({key: float(value) for key, value in sums.items()})
    assert size is not None
    return size


@given(LOG_WEIGHTS)
def test_it_is_a_share_between_one_trajectory_and_all(log_weights: list[float]) -> None:
    size = size_of(log_weights)
    assert 0.999999 / len(log_weights) <= size <= 1


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.floats(-100, 100))
def test_a_common_factor_of_all_weights_changes_nothing(log_weights: list[float], factor: float) -> None:
    assert size_of([one + factor for one in log_weights]) == pytest.approx(size_of(log_weights), rel=1e-9)


def test_equal_weights_count_in_full_and_a_dominant_one_alone() -> None:
    assert size_of([0.3] * 7) == pytest.approx(1)
    assert size_of([-1e9] * 3 + [1e9]) == pytest.approx(1 / 4)
    assert size_of([0.0, math.log(3)]) == pytest.approx((1 + 3) ** 2 / (2 * (1 + 9)))
    assert relative_size({}) is None


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.4])
def test_the_metric_is_that_of_the_plain_formula_however_the_step_is_divided(noise: float) -> None:
    batch = groups(count=4, model=llama(), noise=noise)
    wanted = plain.relative_ess(llama(), batch)
    if noise == 0.4:
        assert wanted < 0.6, "the weights are too even to show anything"
    for settings, calls in (
        ({"micro_batch_tokens": 4096}, [batch]),
        ({"micro_batch_tokens": 16}, [[group] for group in batch]),
        ({"algorithm": {"name": "reinforce_pp"}}, [batch]),
        ({"algorithm": {"correction": "token_truncate"}}, [batch]),
    ):
        made = trainer(llama(), **settings)
        for call in calls:
            made.accumulate(0, call)
        assert made.apply(0).metrics["off_policy/ess"] == pytest.approx(wanted, rel=1e-3)


def test_it_covers_the_trajectories_that_were_computed() -> None:
    batch = groups(count=3, model=llama())
    made = trainer(llama())
    made.accumulate(0, [even(batch[0]), *batch[1:]])
    assert made.apply(0).metrics["off_policy/ess"] == pytest.approx(plain.relative_ess(llama(), batch[1:]), rel=1e-3)
    made.accumulate(1, [even(group) for group in batch])
    assert "off_policy/ess" not in made.apply(1).metrics


def stepped(batch: list[Group], **optimiser: Any) -> tuple[Trainer, dict[str, float]]:
    made = trainer(llama(), optimiser=optimiser)
    made.accumulate(0, batch)
    return made, made.apply(0).metrics


def test_the_learning_rate_is_scaled_by_the_square_root() -> None:
    batch = groups(count=3, model=llama())
    made, metrics = stepped(batch, learning_rate=1e-2, ess_scaling=True)
    rate = 1e-2 * math.sqrt(plain.relative_ess(llama(), batch))
    assert metrics["learning_rate"] == pytest.approx(rate, rel=1e-3)
    assert metrics["learning_rate"] == pytest.approx(1e-2 * math.sqrt(metrics["off_policy/ess"]), rel=1e-6)
    same, _ = stepped(batch, learning_rate=metrics["learning_rate"])
    for name, tensor in weights(same.model).items():
        torch.testing.assert_close(weights(made.model)[name], tensor, rtol=1e-6, atol=1e-8)


def test_without_the_setting_and_on_policy_the_learning_rate_is_that_of_the_schedule() -> None:
    assert stepped(groups(model=llama()), learning_rate=1e-2)[1]["learning_rate"] == 1e-2
    fresh = groups(model=llama(), noise=0.0)
    assert stepped(fresh, learning_rate=1e-2, ess_scaling=True)[1]["learning_rate"] == pytest.approx(1e-2, rel=1e-4)


def test_an_update_without_computed_trajectories_is_not_scaled() -> None:
    unmoved = [even(group) for group in groups()]
    assert stepped(unmoved, learning_rate=1e-2, ess_scaling=True)[1]["learning_rate"] == 1e-2


def test_every_update_is_scaled_by_its_own_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = groups(count=2, model=llama())
    made = trainer(llama(), mini_batches=2, optimiser={"learning_rate": 1e-9, "ess_scaling": True})
    rates: list[float] = []
    update = made.optimiser.update

    def recorded(*arguments: float) -> float:
        rates.append(update(*arguments))
        return rates[-1]

    monkeypatch.setattr(made.optimiser, "update", recorded)
    made.accumulate(0, batch)
    assert made.apply(0).metrics["learning_rate"] == rates[0]
    wanted = [1e-9 * math.sqrt(plain.relative_ess(llama(), [group])) for group in batch]
    assert rates == pytest.approx(wanted, rel=1e-3)
    assert rates[0] != pytest.approx(rates[1], rel=1e-2)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"algorithm": {"name": "supervised"}, "optimiser": {"ess_scaling": True}}, "has no importance weights"),
        ({"algorithm": {"name": "gspo", "trust_region": "binary_tv"}}, "replaces a clip of token ratios, which 'gspo'"),
        ({"algorithm": {"name": "cispo", "trust_region": "binary_kl"}}, "which 'cispo' does not have"),
        ({"algorithm": {"name": "supervised", "trust_region": "binary_kl"}}, "which 'supervised' does not have"),
        ({"algorithm": {"trust_region": "binary_kl", "clip_high": 0.3}}, "clip_high has no effect with trust_region"),
        ({"algorithm": {"name": "gspo", "trust_region": "second_moment"}}, "which 'gspo' does not have"),
        ({"algorithm": {"name": "supervised", "veto": 1e-4}}, "has no ratios to veto"),
        ({"algorithm": {"trust_region_delta": 0.1}}, "trust_region_delta has no effect on a clip"),
    ],
)
def test_combinations_without_an_effect_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(TrainerConfig, tree)
