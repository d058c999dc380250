"""Settings of training: from the config file through the trainer's process to the weights that it publishes.

Each case is the same two steps on the same groups with one setting changed. What changes results must give other
weights; what only saves memory or time must give the same. That the new weights are the right ones is shown where the
formulas are: `tests/trainer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core.tokens import TokenChunk
from dora_rl.runtime.transport import messages as m
from tests.runtime.making import merged
from tests.settings.workers import InstancePart, TrainerPart, at, folder_of

STEPS = 2
TRAINER = "trainer."
OPTIMISER = "trainer.optimiser."
ALGORITHM = "trainer.algorithm."
LORA = {"trainer": {"lora": {"rank": 2, "alpha": 8, "targets": ["q_proj", "v_proj"]}}}
FALLS = {"trainer": {"optimiser": {"schedule": "linear", "total_updates": 8}}}
MASKS = {"trainer": {"algorithm": {"correction": "token_mask"}}}
CAPS = {"trainer": {"algorithm": {"correction": "token_truncate", "correction_high": 1.5}}}
CONSTANT = {"trainer": {"algorithm": {"aggregation": "constant_length", "constant_length": 30}}}

FREE = {"trainer": {"optimiser": {"epsilon": 1e-3, "max_gradient_norm": 1e6}}}
"""AdamW forgets the size of a gradient, but for what clips it and for epsilon."""

CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    # key, another value, and what else is set on both sides
    (OPTIMISER + "learning_rate", 2e-3, {}),
    (OPTIMISER + "betas", [0.5, 0.95], {}),
    (OPTIMISER + "betas", [0.9, 0.5], {}),
    (OPTIMISER + "epsilon", 1e-2, {}),
    (OPTIMISER + "weight_decay", 0.5, {}),
    (OPTIMISER + "warmup_updates", 4, {}),
    (OPTIMISER + "schedule", "cosine", FALLS),
    (OPTIMISER + "total_updates", 4, FALLS),
    (OPTIMISER + "final_share", 0.5, FALLS),
    (OPTIMISER + "max_gradient_norm", 1e-3, {}),
    (ALGORITHM + "name", "rloo", {}),
    (ALGORITHM + "aggregation", "token_mean", {}),
    (ALGORITHM + "constant_length", 60, merged(CONSTANT, FREE)),
    (ALGORITHM + "clip_low", 0.01, {}),
    (ALGORITHM + "clip_high", 0.01, {}),
    (ALGORITHM + "clip_negative", 1.05, {}),
    (ALGORITHM + "correction", "token_truncate", {}),
    (ALGORITHM + "correction_low", 0.9, MASKS),
    (ALGORITHM + "correction_high", 1.01, MASKS),
    (ALGORITHM + "correction_high", 1.05, CAPS),
    (ALGORITHM + "kl_coefficient", 0.5, {}),
    (ALGORITHM + "entropy_coefficient", 0.1, {}),
    (ALGORITHM + "no_signal", "skip", FREE),
    (TRAINER + "mini_batches", 2, {}),
    (TRAINER + "epochs", 2, {}),
    (TRAINER + "precision", "bfloat16", {}),
    (TRAINER + "lora.rank", 4, LORA),
    (TRAINER + "lora.alpha", 16, LORA),
    (TRAINER + "lora.targets", ["q_proj", "k_proj"], LORA),
    ("seed", 5, LORA),
    ("sampling.temperature", 0.7, {}),
]
SAME: list[tuple[str, Any]] = [
    (TRAINER + "micro_batch_tokens", 80),
    (TRAINER + "gradient_checkpointing", True),
    (OPTIMISER + "offload", True),
]


def groups(first: int, version: int) -> tuple[m.SampledGroup, ...]:
    """Ragged groups off the policy by a little; the last has no signal."""
    random = np.random.default_rng(first)
    made = []
    for number in range(first, first + 4):
        siblings = []
        prompt = random.integers(2, 15, 5)
        for sibling in range(3):
            response = random.integers(2, 15, random.integers(4, 40))
            siblings.append(
                m.SampledTrajectory(
                    id=number * 3 + sibling,
                    version=version,
                    prompt=prompt.astype(np.int32).tobytes(),
                    chunks=(
                        TokenChunk.of(
                            number * 3 + sibling,
                            response,
                            -2.7 + 0.4 * random.standard_normal(len(response)),
                            version=version,
                        ),
                    ),
                    reward=1.0 if number == first + 3 else float(random.integers(0, 3)) + (sibling == 0),
                    stop_reason="stop",
                )
            )
        made.append(m.SampledGroup(id=number, trajectories=tuple(siblings)))
    return tuple(made)


def trained(base: Path, *changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """What is published after the steps, and the metrics of the last."""
    with TrainerPart(folder_of(base, *changes)) as part:
        for step in range(STEPS):
            metrics = part.step(groups(4 * step, step))
        return part.weights(), metrics


_KNOWN: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}


def usual(base: Path, *changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The same, kept: several cases start from it."""
    key = repr(changes)
    if key not in _KNOWN:
        _KNOWN[key] = trained(base, *changes)
    return _KNOWN[key]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two sets of weights; without end where their shapes differ."""
    if {name: tensor.shape for name, tensor in one.items()} != {name: tensor.shape for name, tensor in other.items()}:
        return float("inf")
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def test_the_same_settings_give_the_same_weights(base: Path) -> None:
    assert distance(trained(base)[0], usual(base, {})[0]) == 0
    assert distance(trained(base, LORA)[0], usual(base, LORA)[0]) == 0


@pytest.mark.parametrize(("key", "value", "beside"), CHANGES, ids=[f"{key}={value}" for key, value, _ in CHANGES])
def test_another_value_gives_other_weights(base: Path, key: str, value: Any, beside: dict[str, Any]) -> None:
    changed, _ = trained(base, beside, at(key, value))
    assert distance(changed, usual(base, beside)[0]) > 1e-6


@pytest.mark.parametrize(("key", "value"), SAME, ids=[key for key, _ in SAME])
def test_what_saves_memory_gives_the_same_weights(base: Path, key: str, value: Any) -> None:
    # Adam's first steps have the size of the learning rate wherever a gradient is, so rounding shows as a share of it.
    beside = at(OPTIMISER + "epsilon", 1e-4)
    assert distance(trained(base, beside, at(key, value))[0], usual(base, beside)[0]) < 1e-5


def test_what_saves_memory_is_done(base: Path) -> None:
    """The results are the same, so what they cost is looked at."""
    with TrainerPart(folder_of(base, at(TRAINER + "gradient_checkpointing", True))) as part:
        assert any(getattr(module, "gradient_checkpointing", False) for module in part.trainer.model.modules())
    with TrainerPart(folder_of(base, at(OPTIMISER + "offload", True))) as part:
        held = part.trainer.optimiser.adamw.param_groups[0]["params"]
        assert not {id(one) for one in held} & {id(one) for one in part.trainer.optimiser.parameters}
    passes = {}
    for size in (4096, 80):
        with TrainerPart(folder_of(base, at(TRAINER + "micro_batch_tokens", size))) as part:
            passes[size] = 0
            part.trainer.policy.register_forward_hook(lambda *_, size=size: passes.update({size: passes[size] + 1}))
            part.process._handle(m.TrainGroups(step=0, attempt=0, groups=groups(0, 0)))
    assert passes[80] > passes[4096] == 1


def test_updates_are_counted(base: Path) -> None:
    assert usual(base, {})[1]["batch/updates"] == 1
    assert trained(base, at(TRAINER + "mini_batches", 2))[1]["batch/updates"] == 2
    assert trained(base, at(TRAINER + "mini_batches", 2), at(TRAINER + "epochs", 3))[1]["batch/updates"] == 6


def test_a_mini_batch_is_a_part_of_the_groups(base: Path) -> None:
    """Two mini-batches are two updates with half of the groups each, two epochs two updates with all of them."""
    halves, wholes = trained(base, at(TRAINER + "mini_batches", 2))[0], trained(base, at(TRAINER + "epochs", 2))[0]
    assert distance(halves, wholes) > 1e-6


def test_the_trainer_takes_the_temperature_of_sampling(base: Path) -> None:
    """Its log-probs are those that rollout sampled with: nothing lies between engine and trainer."""
    for temperature in (0.6, 1.7):
        folder = folder_of(base, at("sampling.temperature", temperature))
        with TrainerPart(folder) as trainer:
            trainer.publish()
            assert trainer.step(said(InstancePart(folder), folder, 0))["mismatch_gap"] < 1e-4


@pytest.mark.parametrize("alpha", [2, 8])
def test_engine_and_trainer_scale_an_adapter_alike(base: Path, alpha: int) -> None:
    """Also after it has moved: a scale that only one of them uses shows in the log-probs of the next version."""
    folder = folder_of(base, LORA, at(TRAINER + "lora.alpha", alpha), at(OPTIMISER + "learning_rate", 0.05))
    with TrainerPart(folder) as trainer:
        trainer.publish()
        instance = InstancePart(folder)
        fresh = said(instance, folder, 0)
        trainer.step(groups(0, 0))
        instance.load(1)
        assert trainer.step(said(instance, folder, 1))["mismatch_gap"] < 1e-4
    assert b"".join(one.chunks[0].logprob_data for one in fresh[0].trajectories) != b"".join(
        one.chunks[0].logprob_data for one in said(instance, folder, 1)[0].trajectories
    ), "the adapter has not moved, so this shows nothing"


def test_the_scale_of_an_adapter_is_alpha_over_rank(base: Path) -> None:
    """What is served is the base with alpha / rank times the adapter, added by hand in a plain model."""
    from transformers import AutoModelForCausalLM

    found = {}
    for alpha in (8, 16):
        folder = folder_of(base, LORA, at(TRAINER + "lora.alpha", alpha))
        with TrainerPart(folder) as trainer, torch.no_grad():
            for parameter in trainer.trainer.optimiser.parameters:
                parameter.fill_(0.05)
            trainer.publish()
            (group,) = said(InstancePart(folder), folder, 0)
        plain: Any = AutoModelForCausalLM.from_pretrained(base / "model")
        with torch.no_grad():
            for layer in plain.model.layers:
                for target in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                    target.weight += alpha / 2 * 2 * 0.05**2  # the rank is 2, so each entry of B @ A is 2 * 0.05^2
            for one in group.trajectories:
                tokens = np.concatenate([np.frombuffer(one.prompt, np.int32), one.chunks[0].tokens])
                table = plain(input_ids=torch.tensor(tokens[None].astype(np.int64))).logits[0].log_softmax(-1)
                response = torch.tensor(one.chunks[0].tokens.astype(np.int64))
                wanted = table[-len(response) - 1 : -1].gather(1, response[:, None])[:, 0]
                served = torch.tensor(one.chunks[0].logprobs.copy())
                assert torch.allclose(served, wanted, atol=1e-4)
        found[alpha] = [one.chunks[0].logprob_data for one in group.trajectories]
    assert found[8] != found[16]


def said(instance: InstancePart, folder: Any, version: int) -> tuple[m.SampledGroup, ...]:
    """A group that the instance says, as the trainer gets it."""
    from dora_rl.engine.requests import Request

    sampling = folder.read().request_sampling((1,))
    prompt = (3, 7, 12, 5, 14)
    numbers = range(100 * (version + 1), 100 * (version + 1) + 4)
    requests = tuple(Request(trajectory=one, version=version, prompt=prompt, sampling=sampling) for one in numbers)
    tokens = instance.answer(m.SubmitRequests(slot=0, requests=requests))
    return (
        m.SampledGroup(
            id=25 * (version + 1),
            trajectories=tuple(
                m.SampledTrajectory(
                    id=one,
                    version=version,
                    prompt=np.asarray(prompt, dtype=np.int32).tobytes(),
                    chunks=(TokenChunk.of(one, tokens[one], instance.logprobs[one], version=version),),
                    reward=float(place),
                    stop_reason="stop",
                )
                for place, one in enumerate(numbers)
            ),
        ),
    )


@pytest.mark.parametrize(("every", "keep", "found"), [(1, 2, [3, 4]), (1, 3, [2, 3, 4]), (2, 2, [2, 4]), (3, 2, [3])])
def test_checkpoints_are_written_and_kept_as_told(base: Path, every: int, keep: int, found: list[int]) -> None:
    from dora_rl.trainer import checkpoint

    folder = folder_of(base, {"checkpoint": {"every": every, "keep": keep}})
    with TrainerPart(folder) as part:
        for step in range(4):
            part.step(groups(4 * step, step))
    assert checkpoint.versions(folder.checkpoints) == found
