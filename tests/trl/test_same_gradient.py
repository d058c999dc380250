"""A `GRPOConfig` of ours and TRL's own, with the same arguments, have the same loss and gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.factories import assert_close, gradients, groups, llama, trainer
from tests.trl.conftest import resolved

pytest.importorskip("trl")
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grpo": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": False},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 48, "delta": 1.5},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "kl": {"beta": 0.3},
    "kl, not weighted": {"beta": 0.3, "use_bias_correction_kl": False, "loss_type": "grpo"},
    "entropy": {"entropy_coef": 0.2},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_trl(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.trainer.trl_peer import scored_inputs, trl_trainer

    batch = groups(count=4, model=llama(), noise=0.1 if name == "sequences" else 0.4, holes=False)
    llama().save_pretrained(tmp_path / "model")
    peer_model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # TRL loads its reference by the same name
    peer = trl_trainer(peer_model, batch, tmp_path, **CASES[name])
    inputs = scored_inputs(peer, batch)
    model = llama()
    size: dict[str, Any] = {"num_generations": len(batch[0].trajectories), "per_device_train_batch_size": 16}
    config = resolved(max_staleness=0, **CASES[name], **size)
    made = trainer(
        model,
        algorithm=config.trainer_settings().algorithm.model_dump(),
        optimiser={"learning_rate": 1e-9},
        micro_batch_tokens=80,
    )
    with torch.no_grad():  # both move away from the reference, which is the model as given
        for one in (model, peer_model):
            for parameter in one.parameters():
                parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel()).float()).view_as(parameter))
    peer_model.train()
    loss = peer._compute_loss(peer_model, inputs)
    loss.backward()
    made.accumulate(0, batch)
    assert made._open is not None
    found = {key: gradient / made._open.denominator for key, gradient in gradients(model).items()}
    assert_close(found, gradients(peer_model), 2e-4)
    assert made.apply(0).metrics["loss"] == pytest.approx(float(loss.detach()), abs=2e-4)
