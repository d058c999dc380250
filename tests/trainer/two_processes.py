"""The program of each rank in `test_distributed`: python -m tests.trainer.two_processes FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dora_rl.core.errors import NonFiniteError
from dora_rl.trainer import checkpoint
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.rank_group import RankGroup, join_from_environment
from dora_rl.trainer.trainable import full_tensor
from dora_rl.trainer.trainer import Trainer
from dora_rl.weights.store import WeightStore
from tests.trainer.factories import groups, llama, moe
from tests.trainer.test_trainer import replaced

MODELS: dict[str, Any] = {
    "tied": lambda: llama(tie_word_embeddings=True),
    "untied": llama,
    "moe": moe,
    "moe-alone": moe,
    "lora": llama,
    "offload": llama,
    "checkpointing": llama,
    "corrected": llama,
    "whole": llama,
    "gaps": llama,
}
SETTINGS: dict[str, Any] = {name: {"optimiser": {"learning_rate": 1e-2}, "micro_batch_tokens": 60} for name in MODELS}
SETTINGS["moe-alone"] = SETTINGS["moe-alone"] | {"micro_batch_tokens": 10_000}  # one of two ranks has no micro-batch
SETTINGS["lora"] = SETTINGS["lora"] | {"lora": {"rank": 4}}
SETTINGS["offload"] = SETTINGS["offload"] | {"optimiser": {"learning_rate": 1e-2, "offload": True}}
SETTINGS["checkpointing"] = SETTINGS["checkpointing"] | {
    "gradient_checkpointing": True,
    "algorithm": {"name": "dapo", "kl_coefficient": 0.1},
    "mini_batches": 2,
}
SETTINGS["corrected"] = SETTINGS["corrected"] | {
    "optimiser": {"learning_rate": 1e-2, "ess_scaling": True},
    "algorithm": {"name": "dapo", "trust_region": "binary_tv", "trust_region_delta": 0.005, "veto": 0.5},
}
SETTINGS["gaps"] = SETTINGS["gaps"] | {"measure_gap_every": 1}
SETTINGS["whole"] = SETTINGS["whole"] | {"algorithm": {"name": "dapo", "trust_region": "second_moment"}}


def make(name: str, rank_group: RankGroup) -> Trainer:
    torch.manual_seed(3)
    model = MODELS[name]()
    torch.manual_seed(4)  # adapters start with the same values on all ranks
    return Trainer(model, TrainerConfig.model_validate(SETTINGS[name]), rank_group=rank_group, max_staleness=1)


def run(name: str, rank_group: RankGroup) -> dict[str, Any]:
    """Gradients of the first step, weights after two, and the metrics of the second."""
    made = make(name, rank_group)
    # An odd number of micro-batches: one rank has to take part without a micro-batch.
    batch = groups(count=3, model=MODELS[name](), seed=1)
    made.accumulate(0, batch)
    gradients = {}
    if made._open is not None and made.config.streams:
        scale = rank_group.size / made._open.denominator
        gradients = {
            key: full_tensor(parameter.grad) * scale
            for key, parameter in zip(made.optimiser.names, made.optimiser.parameters, strict=True)
            if parameter.grad is not None
        }
    made.apply(0)
    made.accumulate(1, groups(count=3, seed=2, version=0 if name == "gaps" else 1))
    report = made.apply(1)
    weights = {key: full_tensor(tensor).clone() for key, tensor in made.model.state_dict().items()}
    return {"gradients": gradients, "weights": weights, "metrics": report.metrics}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank_group = join_from_environment("cpu", timeout_s=60)
    results = {name: run(name, rank_group) for name in MODELS}

    made = make("untied", rank_group)
    store = WeightStore(folder / "store", keep=2)
    made.accumulate(0, groups(count=3, seed=1))
    made.apply(0)
    fingerprint = made.publish(1, store)
    checkpoint.save(folder / f"saved-by-{rank_group.size}", made, last_step={"saved by": rank_group.size})

    bad = groups(count=3, seed=2, version=1)
    worst = bad[2].trajectories[3]
    behaviour = np.where(worst.loss_mask, np.float32(-1e9), worst.behaviour_logprobs)
    bad[2] = replaced(bad[2], 3, behaviour_logprobs=behaviour, reward=-9.0)
    try:
        made.accumulate(1, bad)
    except NonFiniteError as error:
        results["culprits"] = {"trajectories": error.trajectories}

    other = folder / "saved-by-1"
    if rank_group.size > 1 and (path := checkpoint.latest(other)) is not None:
        again = make("untied", rank_group)
        checkpoint.restore(path, again)
        again.accumulate(1, groups(count=3, seed=2, version=1))
        again.apply(1)
        results["resumed"] = {"weights": {k: full_tensor(t).clone() for k, t in again.model.state_dict().items()}}
    results["published"] = {"fingerprint": fingerprint}
    torch.save(results, folder / f"results-{rank_group.size}-{rank_group.rank}.pt")
    if rank_group.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
