"""The same model, batch, rewards and settings give the loss and the gradient of TRL's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.factories import assert_close, gradients, groups, llama, trainer
from tests.trainer.trl_peer import scored_inputs, trl_trainer

LENGTH = 48
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": (
        {"name": "dr_grpo", "constant_length": LENGTH},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": LENGTH},
    ),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"name": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "longcat": (
        {"name": "longcat", "constant_length": LENGTH},
        {"loss_type": "dr_grpo", "epsilon_high": 0.28, "delta": 3.0, "max_completion_length": LENGTH},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(name: str, tmp_path: Path) -> None:
    ours, theirs = CASES[name]
    noise = 0.002 if name == "gspo" else 0.4
    batch = groups(count=4, model=llama(), noise=noise, holes=False)
    peer_model = llama()
    peer = trl_trainer(peer_model, batch, tmp_path, **theirs)
    peer_model.train()
    loss = peer._compute_loss(peer_model, scored_inputs(peer, batch))
    loss.backward()
    wanted = gradients(peer_model)

    model = llama()
    made = trainer(model, algorithm=ours, optimiser={"learning_rate": 1e-9}, micro_batch_tokens=80)
    made.accumulate(0, batch)
    assert made._open is not None
    found = {key: gradient / made._open.denominator for key, gradient in gradients(model).items()}
    report = made.apply(0)
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-4)
    assert report.metrics["clip_fraction"] > 0.02, "too few ratios are clipped to test the bounds"
    assert_close(found, wanted, 1e-4)
