"""Training settings, from the config file through the trainer worker to the published weights.

Each case runs the same two steps on the same groups with one setting changed. A setting that affects results must
change the weights; a setting that only saves memory or time must not. The tests in `tests/trainer` check that the
formulas are correct.
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
from tests.settings.workers import InstanceHarness, TrainerHarness, at, folder_of

STEPS = 2
TRAINER = "trainer."
OPTIMISER = "trainer.optimiser."
ALGORITHM = "trainer.algorithm."
LORA = {"trainer": {"lora": {"rank": 2, "alpha": 8, "targets": ["q_proj", "v_proj"]}}}
FALLS = {"trainer": {"optimiser": {"schedule": "linear", "total_updates": 8}}}
MASKS = {"trainer": {"algorithm": {"correction": "token_mask"}}}
DIVERGES = {"trainer": {"algorithm": {"trust_region": "binary_tv"}}}
CAPS = {"trainer": {"algorithm": {"correction": "token_truncate", "correction_high": 1.5}}}
CONSTANT = {"trainer": {"algorithm": {"aggregation": "constant_length", "constant_length": 30}}}
PENALISED = {"trainer": {"algorithm": {"kl_coefficient": 0.5}}}

FREE = {"trainer": {"optimiser": {"epsilon": 1e-3, "max_gradient_norm": 1e6}}}
"""AdamW is insensitive to the scale of a gradient except through clipping and epsilon."""

CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    # key, changed value, and other settings that both runs share
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
    (OPTIMISER + "ess_scaling", True, {}),
    (ALGORITHM + "name", "rloo", {}),
    (ALGORITHM + "aggregation", "token_mean", {}),
    (ALGORITHM + "constant_length", 60, merged(CONSTANT, FREE)),
    (ALGORITHM + "clip_low", 0.01, {}),
    (ALGORITHM + "clip_high", 0.01, {}),
    (ALGORITHM + "clip_negative", 1.05, {}),
    (ALGORITHM + "trust_region", "binary_tv", {}),
    (ALGORITHM + "trust_region", "binary_kl", {}),
    (ALGORITHM + "trust_region", "second_moment", {}),
    (ALGORITHM + "trust_region_delta", 0.001, DIVERGES),
    (ALGORITHM + "veto", 0.5, {}),
    (ALGORITHM + "correction", "token_truncate", {}),
    (ALGORITHM + "correction", "geometric_mask", {}),
    (ALGORITHM + "correction_low", 0.9, MASKS),
    (ALGORITHM + "correction_high", 1.01, MASKS),
    (ALGORITHM + "correction_high", 1.05, CAPS),
    (ALGORITHM + "kl_coefficient", 0.5, {}),
    (ALGORITHM + "kl_ratio", True, PENALISED),
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


def groups(first: int, version: int, logprob: float = -2.7) -> tuple[m.SampledGroup, ...]:
    """Return slightly off-policy groups with responses of different lengths; the last group has no signal."""
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
                            logprob + 0.4 * random.standard_normal(len(response)),
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
    """Return the weights published after the steps, and the metrics of the last step."""
    with TrainerHarness(folder_of(base, *changes)) as harness:
        for step in range(STEPS):
            metrics = harness.step(groups(4 * step, step))
        return harness.weights(), metrics


_KNOWN: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}


def usual(base: Path, *changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the cached result of `trained`, because several cases compare with it."""
    key = repr(changes)
    if key not in _KNOWN:
        _KNOWN[key] = trained(base, *changes)
    return _KNOWN[key]


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference between two sets of weights, or infinity if their shapes differ."""
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
def test_memory_settings_leave_the_weights_unchanged(base: Path, key: str, value: Any) -> None:
    # Adam's first steps are as large as the learning rate for any nonzero gradient, which amplifies rounding errors.
    beside = at(OPTIMISER + "epsilon", 1e-4)
    assert distance(trained(base, beside, at(key, value))[0], usual(base, beside)[0]) < 1e-5


def test_memory_settings_take_effect(base: Path) -> None:
    """The results are the same, so this test inspects how they are computed."""
    with TrainerHarness(folder_of(base, at(TRAINER + "gradient_checkpointing", True))) as harness:
        assert any(getattr(module, "gradient_checkpointing", False) for module in harness.trainer.model.modules())
    with TrainerHarness(folder_of(base, at(OPTIMISER + "offload", True))) as harness:
        held = harness.trainer.optimiser.adamw.param_groups[0]["params"]
        assert not {id(one) for one in held} & {id(one) for one in harness.trainer.optimiser.parameters}
    passes = {}
    for size in (4096, 80):
        with TrainerHarness(folder_of(base, at(TRAINER + "micro_batch_tokens", size))) as harness:
            passes[size] = 0
            harness.trainer.policy.register_forward_hook(lambda *_, size=size: passes.update({size: passes[size] + 1}))
            harness.process._handle(m.TrainGroups(step=0, attempt=0, groups=groups(0, 0)))
    assert passes[80] > passes[4096] == 1


def test_updates_are_counted(base: Path) -> None:
    assert usual(base, {})[1]["batch/updates"] == 1
    assert trained(base, at(TRAINER + "mini_batches", 2))[1]["batch/updates"] == 2
    assert trained(base, at(TRAINER + "mini_batches", 2), at(TRAINER + "epochs", 3))[1]["batch/updates"] == 6


def test_gaps_are_measured_as_configured(base: Path) -> None:
    """In every step with stale groups if `trainer.measure_gap_every` is 1, within the staleness bound of the run."""
    for every, bound, wanted in ((0, 3, False), (1, 3, True), (1, 0, False)):
        folder = folder_of(base, at(TRAINER + "measure_gap_every", every), at("control.max_staleness", bound))
        with TrainerHarness(folder) as harness:
            harness.step(groups(0, 0))
            assert ("off_policy/engine_kl" in harness.step(groups(4, 0))) == wanted


def test_a_mini_batch_is_a_subset_of_the_groups(base: Path) -> None:
    """Two mini-batches are two updates on half of the groups each; two epochs are two updates on all groups."""
    halves, wholes = trained(base, at(TRAINER + "mini_batches", 2))[0], trained(base, at(TRAINER + "epochs", 2))[0]
    assert distance(halves, wholes) > 1e-6


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({}, 3.0),
        ({"control": {"mode": "partial"}}, 3.0),
        ({"control": {"mode": "one_step_off"}}, 3.0),
        ({"control": {"max_staleness": "auto"}}, 3.0),
        ({"control": {"mode": "sync"}}, None),
        ({"control": {"max_staleness": 0}}, None),
        ({"trainer": {"algorithm": {"name": "dapo"}}}, 3.0),
        ({"trainer": {"algorithm": {"name": "gspo"}}}, None),
        ({"trainer": {"algorithm": {"name": "cispo"}}}, None),
        ({"trainer": {"algorithm": {"clip_negative": 9.0}}}, 9.0),
        ({"trainer": {"algorithm": {"trust_region": "binary_tv"}}}, None),
        ({"trainer": {"algorithm": {"correction": "token_mask"}}}, None),
    ],
)
def test_stale_groups_get_a_bound_for_negative_advantages_unless_something_else_limits_the_ratio(
    base: Path, settings: dict[str, Any], bound: float | None
) -> None:
    assert folder_of(base, settings).read().trainer_settings().algorithm.bounds.negative == bound


def test_the_bound_for_negative_advantages_reaches_the_trainer(base: Path) -> None:
    """Ratios in these groups reach 4, so the weights differ from those of a bound that is out of reach."""
    found = []
    for settings in ({}, at(ALGORITHM + "clip_negative", 3.0), at(ALGORITHM + "clip_negative", 1000.0)):
        with TrainerHarness(folder_of(base, FREE, settings)) as trainer:
            trainer.publish()
            found.append(trainer.step(groups(0, 0, logprob=-4.0))["clip_fraction"])
    assert found[0] == found[1] > found[2]


def test_the_trainer_uses_the_sampling_temperature(base: Path) -> None:
    """The trainer computes the same log-probs that the engine sampled with."""
    for temperature in (0.6, 1.7):
        folder = folder_of(base, at("sampling.temperature", temperature))
        with TrainerHarness(folder) as trainer:
            trainer.publish()
            assert trainer.step(sampled_group(InstanceHarness(folder), folder, 0))["mismatch_gap"] < 1e-4


@pytest.mark.parametrize("alpha", [2, 8])
def test_engine_and_trainer_scale_an_adapter_alike(base: Path, alpha: int) -> None:
    """The log-probs also agree after an update, where a difference in scale would become visible."""
    folder = folder_of(base, LORA, at(TRAINER + "lora.alpha", alpha), at(OPTIMISER + "learning_rate", 0.05))
    with TrainerHarness(folder) as trainer:
        trainer.publish()
        instance = InstanceHarness(folder)
        fresh = sampled_group(instance, folder, 0)
        trainer.step(groups(0, 0))
        instance.load(1)
        assert trainer.step(sampled_group(instance, folder, 1))["mismatch_gap"] < 1e-4
    assert b"".join(one.chunks[0].logprob_data for one in fresh[0].trajectories) != b"".join(
        one.chunks[0].logprob_data for one in sampled_group(instance, folder, 1)[0].trajectories
    ), "the adapter has not moved, so this shows nothing"


def test_the_scale_of_an_adapter_is_alpha_over_rank(base: Path) -> None:
    """The served log-probs match a plain model to which alpha / rank times the adapter was added explicitly."""
    from transformers import AutoModelForCausalLM

    found = {}
    for alpha in (8, 16):
        folder = folder_of(base, LORA, at(TRAINER + "lora.alpha", alpha))
        with TrainerHarness(folder) as trainer, torch.no_grad():
            for parameter in trainer.trainer.optimiser.parameters:
                parameter.fill_(0.05)
            trainer.publish()
            (group,) = sampled_group(InstanceHarness(folder), folder, 0)
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


def sampled_group(instance: InstanceHarness, folder: Any, version: int) -> tuple[m.SampledGroup, ...]:
    """Return a group that the instance generates, in the form that the trainer receives."""
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
                    reward=float(index),
                    stop_reason="stop",
                )
                for index, one in enumerate(numbers)
            ),
        ),
    )


@pytest.mark.parametrize(("every", "keep", "found"), [(1, 2, [3, 4]), (1, 3, [2, 3, 4]), (2, 2, [2, 4]), (3, 2, [3])])
def test_checkpoints_are_written_and_kept_as_configured(base: Path, every: int, keep: int, found: list[int]) -> None:
    from dora_rl.trainer import checkpoint

    folder = folder_of(base, {"checkpoint": {"every": every, "keep": keep}})
    with TrainerHarness(folder) as harness:
        for step in range(4):
            harness.step(groups(4 * step, step))
    assert checkpoint.versions(folder.checkpoints) == found


def test_a_trainer_deletes_what_a_killed_one_left_half_written(base: Path) -> None:
    """Also if it never writes a checkpoint itself, since the last version is saved already."""
    folder = folder_of(base)
    left = folder.checkpoints / ".partial-version-00000003.0"
    (left / "state").mkdir(parents=True)
    with TrainerHarness(folder):
        assert not left.exists()
