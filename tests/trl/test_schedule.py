"""TRL's batch sizes and numbers of updates, in groups and steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from dora_rl import ConfigError
from dora_rl.trl import GRPOConfig
from dora_rl.trl.schedule import schedule
from tests.trl.conftest import resolved


def made(rows: int | None = 100, processes: int = 1, **settings: Any) -> tuple[int, int, int, int, int]:
    found = schedule(GRPOConfig(**settings), rows, processes)
    return found.groups_per_step, found.mini_batches, found.epochs, found.updates, found.steps


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (1, 1, 1, 300, 300)),
        ({"gradient_accumulation_steps": 4}, (4, 1, 1, 75, 75)),
        ({"processes": 2, "per_device_train_batch_size": 16, "num_generations": 4}, (8, 1, 1, 36, 36)),
        # Four passes in a generation batch, two of them in an update: two updates in a step.
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, (4, 2, 1, 150, 75)),
        ({"per_device_train_batch_size": 4, "generation_batch_size": 32}, (4, 8, 1, 0, 0)),
        # Every batch is trained three times.
        ({"gradient_accumulation_steps": 2, "num_iterations": 3}, (2, 1, 3, 450, 150)),
        # An update over four generation batches, all of which the same version samples.
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, (4, 1, 1, 75, 75)),
        ({"max_steps": 7}, (1, 1, 1, 7, 7)),
        ({"max_steps": 6, "num_iterations": 3, "rows": None}, (1, 1, 3, 6, 2)),
        ({"num_train_epochs": 0.5}, (1, 1, 1, 50, 50)),
    ],
)
def test_batches(settings: dict[str, Any], wanted: tuple[int, ...]) -> None:
    if wanted[3] == 0:
        with pytest.raises(ConfigError, match="a generation batch of 4 groups can't be divided over 8 updates"):
            made(**settings)
        return
    assert made(**settings) == wanted


@pytest.mark.filterwarnings("ignore")
def test_updates_are_counted_as_trl_does() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    checked = 0
    sizes = itertools.product((10, 33), (1, 2), (4, 8), (1, 2, 4), (1, 2, 4), (1, 2), (2, 4), (2.5,))
    for rows, processes, per_device, accumulation, slices, iterations, size, epochs in sizes:
        settings = {
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": slices,
            "num_iterations": iterations,
            "num_generations": size,
            "num_train_epochs": epochs,
        }
        try:
            _, _, _, updates, _ = made(rows, processes, **settings)
        except ConfigError:
            continue
        batch = per_device * processes * slices
        sampler = utils.RepeatSampler(range(rows), size, batch // size, iterations * slices)
        passes = sum(1 for _ in sampler) // batch
        assert updates == math.ceil(epochs * math.ceil(passes / accumulation)), settings
        checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_generations": 1}, "'num_generations' must be 2 or more"),
        ({"num_generations": 3}, "a generation batch of 8 completions has no whole number of groups"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 3}, "must be a multiple of"),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_iterations": 2},
            "so that no update has a part of a batch",
        ),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "not both"),
        ({"generation_batch_size": 12}, "must be a multiple of the 8 completions of a pass"),
        ({"rows": None}, "set 'max_steps'"),
        ({"rows": 3, "gradient_accumulation_steps": 4}, "has 3 rows, but a step has 4 prompts"),
        ({"num_iterations": 2, "max_steps": 5}, "'max_steps' is 5 updates, but a step has 2"),
        ({"num_iterations": 2, "save_steps": 3}, "'save_steps' is 3 updates, but a step has 2"),
        ({"num_train_epochs": 0}, "'num_train_epochs' must be above 0"),
        ({"save_steps": 2.5}, "must be a whole number, or a share below 1"),
        ({"rows": None, "max_steps": 4, "save_strategy": "epoch"}, "needs a dataset with a length"),
        ({"num_iterations": 0}, "must be above 0"),
    ],
)
def test_what_is_no_whole_number_of_steps_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**settings)
    assert sentence in str(caught.value)


def test_counts_in_updates_become_steps() -> None:
    settings: dict[str, Any] = {
        "num_iterations": 2,
        "max_steps": 40,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_steps": 0.5,
    }
    config = resolved(**settings)
    assert (config.control.steps, config.evaluation.every, config.checkpoint.every) == (20, 5, 10)
    assert config.checkpoint.keep == 4
    assert (config.trainer.optimiser.total_updates, config.trainer.epochs) == (40, 2)
    ranks = resolved(dora={"trainer.ranks": 2}, gradient_accumulation_steps=2)
    assert (ranks.control.groups_per_step, ranks.trainer.ranks) == (4, 2)
