"""Settings of supervised fine-tuning: changing a value changes the weights, or only saves memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core.config import build
from dora_rl.core.trajectory import Group, Trajectory
from dora_rl.trainer.sft import SftConfig, train
from dora_rl.trainer.trainable import merged_state
from tests.trainer.factories import VOCABULARY, llama

BASE: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-3, "lora": None}
CHANGES = [
    ("epochs", 2),
    ("batch_size", 3),
    ("seed", 1),
    ("learning_rate", 2e-3),
    ("weight_decay", 0.5),
    ("lora", {"rank": 2}),
]


def examples() -> list[Group]:
    dice = random.Random(0)
    made = []
    for number in range(12):
        tokens = np.array([dice.randrange(VOCABULARY) for _ in range(dice.randint(6, 20))], dtype=np.int32)
        one = Trajectory(
            id=number,
            version=0,
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= 3,
            behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
            reward=1.0,
        )
        made.append(Group(id=number, trajectories=(one,)))
    return made


def trained(**settings: Any) -> tuple[Any, torch.Tensor]:
    """Return the trainer and all weights of the model that it would write."""
    torch.manual_seed(0)
    trainer = train(llama(), examples(), build(SftConfig, BASE | settings), lambda _: None)
    merged = dict(merged_state(trainer.model, trainer.peft_model))
    return trainer, torch.cat([merged[name].detach().flatten() for name in sorted(merged)])


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=[key for key, _ in CHANGES])
def test_another_value_gives_other_weights(key: str, value: Any) -> None:
    assert torch.equal(trained()[1], trained()[1])
    assert (trained(**{key: value})[1] - trained()[1]).abs().max() > 1e-6


def test_memory_settings_are_passed_on() -> None:
    """This covers `micro_batch_tokens` and `gradient_checkpointing`."""
    trainer, weights = trained(micro_batch_tokens=33, gradient_checkpointing=True)
    assert trainer.config.micro_batch_tokens == 33
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules())
    assert (weights - trained()[1]).abs().max() < 1e-3
