"""Every field of TRL's `GRPOConfig` is mapped, without effect or refused, and a mapped one reaches its setting."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import dora_rl.trl
from dora_rl import ConfigError
from dora_rl.trl import GRPOConfig
from dora_rl.trl.fields import FIELDS, FORMER, TRL_VERSION
from tests.trl.conftest import resolved

VLLM: dict[str, Any] = {"use_vllm": True}
EVAL: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4}
SLICED: dict[str, Any] = {
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 16,
}

# For each mapped field: settings that differ in it from the others, which together change all that it is said to set.
EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "output_dir": [({"output_dir": "elsewhere"}, {})],
    "per_device_train_batch_size": [({"per_device_train_batch_size": 16}, {})],
    "num_train_epochs": [({"num_train_epochs": 2}, {})],
    "max_steps": [({"max_steps": 5}, {})],
    "learning_rate": [({"learning_rate": 3e-5}, {})],
    "lr_scheduler_type": [({"lr_scheduler_type": "cosine"}, {})],
    "lr_scheduler_kwargs": [
        (
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.2}},
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        )
    ],
    "warmup_steps": [({"warmup_steps": 3}, {})],
    "weight_decay": [({"weight_decay": 0.1}, {})],
    "adam_beta1": [({"adam_beta1": 0.8}, {})],
    "adam_beta2": [({"adam_beta2": 0.9}, {})],
    "adam_epsilon": [({"adam_epsilon": 1e-6}, {})],
    "gradient_accumulation_steps": [({"gradient_accumulation_steps": 2}, {})],
    "max_grad_norm": [({"max_grad_norm": 0.5}, {})],
    "bf16": [({"bf16": True}, {})],
    "activation_checkpointing": [({"activation_checkpointing": False}, {})],
    "gradient_checkpointing": [({"gradient_checkpointing": False}, {})],
    "log_level": [({"log_level": "debug"}, {})],
    "report_to": [({"report_to": ["tensorboard", "wandb", "trackio"]}, {})],
    "project": [({"project": "mine"}, {"report_to": ["wandb", "trackio"]})],
    "eval_strategy": [({"eval_strategy": "epoch"}, EVAL)],
    "eval_steps": [({"eval_steps": 2}, EVAL)],
    "save_strategy": [({"save_strategy": "epoch"}, {})],
    "save_steps": [({"save_steps": 3}, {})],
    "save_total_limit": [({"save_total_limit": 7}, {})],
    "seed": [({"seed": 1}, {})],
    "model_init_kwargs": [({"model_init_kwargs": {"dtype": "bfloat16"}}, {})],
    "router_aux_loss_coef": [({"router_aux_loss_coef": 0.01}, {})],
    "num_generations": [({"num_generations": 4}, {})],
    "num_generations_eval": [({"num_generations_eval": 1}, {})],
    "max_completion_length": [({"max_completion_length": 64}, {})],
    "shuffle_dataset": [({"shuffle_dataset": False}, {})],
    "generation_batch_size": [
        ({"generation_batch_size": 32}, {"generation_batch_size": 16, "per_device_train_batch_size": 16})
    ],
    "steps_per_generation": [({"steps_per_generation": 4}, SLICED)],
    "temperature": [({"temperature": 0.7}, {})],
    "top_p": [({"top_p": 0.9}, {})],
    "top_k": [({"top_k": 20}, {})],
    "min_p": [({"min_p": 0.1}, {})],
    "generation_kwargs": [({"generation_kwargs": {"stop": ["\n"], "top_k": 5}}, {})],
    "use_vllm": [(VLLM, {})],
    "vllm_model_impl": [({"vllm_model_impl": "transformers"}, VLLM)],
    "vllm_gpu_memory_utilization": [({"vllm_gpu_memory_utilization": 0.5}, {**VLLM, "device": "cuda"})],
    "vllm_max_model_length": [({"vllm_max_model_length": 2048}, {})],
    "vllm_tensor_parallel_size": [({"vllm_tensor_parallel_size": 2}, VLLM)],
    "use_cpu": [({"use_cpu": True}, {"device": "cuda"})],
    "beta": [({"beta": 0.04}, {})],
    "num_iterations": [({"num_iterations": 2}, {})],
    "epsilon": [({"epsilon": 0.1}, {})],
    "delta": [({"delta": 4.0}, {})],
    "epsilon_high": [({"epsilon_high": 0.28}, {})],
    "importance_sampling_level": [({"importance_sampling_level": "sequence"}, {})],
    "reward_weights": [({"reward_weights": [2.0]}, {})],
    "scale_rewards": [({"scale_rewards": "none"}, {})],
    "loss_type": [({"loss_type": "grpo"}, {}), ({"loss_type": "cispo"}, {"epsilon_high": 5.0})],
    "entropy_coef": [({"entropy_coef": 0.01}, {})],
    "vllm_importance_sampling_correction": [({"vllm_importance_sampling_correction": False}, VLLM)],
    "vllm_importance_sampling_mode": [({"vllm_importance_sampling_mode": "token_truncate"}, VLLM)],
    "vllm_importance_sampling_clip_max": [({"vllm_importance_sampling_clip_max": 2.5}, VLLM)],
    "vllm_importance_sampling_clip_min": [({"vllm_importance_sampling_clip_min": 0.2}, VLLM)],
    "vllm_importance_sampling_cap": [({"vllm_importance_sampling_cap": 2.5}, VLLM)],
    "use_bias_correction_kl": [({"use_bias_correction_kl": False}, {"beta": 0.1})],
    "log_completions": [({"log_completions": True}, {"gradient_accumulation_steps": 4})],
    "num_completions_to_print": [
        ({"num_completions_to_print": 8}, {"gradient_accumulation_steps": 4, "log_completions": True})
    ],
}
# Fields that `GRPOTrainer` itself uses; test_trainer.py and test_history.py have their tests.
BY_THE_TRAINER = {
    "logging_strategy",
    "logging_steps",
    "logging_first_step",
    "disable_tqdm",
    "run_name",
    "metric_for_best_model",
    "greater_is_better",
    "remove_unused_columns",
}


def leaves(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def changed(change: dict[str, Any], base: dict[str, Any]) -> set[str]:
    """The settings that differ between a config and the same config with a change."""
    before = dict(leaves(resolved(**base).model_dump()))
    after = dict(leaves(resolved(**(base | change)).model_dump()))
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_the_table_has_exactly_the_fields() -> None:
    own = {"max_staleness", "dora"}
    assert {each.name for each in dataclasses.fields(GRPOConfig)} - own == FIELDS.keys()
    assert not FORMER.keys() & FIELDS.keys()
    mapped = {name for name, entry in FIELDS.items() if entry.kind == "mapped"}
    assert mapped == EXAMPLES.keys() | BY_THE_TRAINER
    for name, entry in FIELDS.items():
        assert bool(entry.sets) == (entry.kind == "mapped"), name
        assert entry.kind == "mapped" or entry.reason, name


@pytest.mark.filterwarnings("ignore")
def test_fields_and_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl")
    if trl.__version__ != TRL_VERSION:
        pytest.skip(f"the table was made from TRL {TRL_VERSION}")
    theirs = {each.name: each for each in dataclasses.fields(trl.GRPOConfig)}
    assert list(theirs) == list(FIELDS)
    for each in dataclasses.fields(GRPOConfig):
        if each.name in theirs:
            default = theirs[each.name].default
            assert each.default == default, each.name


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_mapped_field_changes_the_settings_that_the_table_names(name: str) -> None:
    found: set[str] = set()
    for change, base in EXAMPLES[name]:
        assert name in change
        found |= changed(change, base)
    for setting in re.findall(r"`([^`]+)`", FIELDS[name].sets):
        assert any(one == setting or one.startswith(f"{setting}.") for one in found), (setting, found)


REFUSED: dict[str, Any] = {
    "optim": "adafactor",
    "trackio_static_space_id": "a/b",
    "include_num_input_tokens_seen": "all",
    "debug": "underflow_overflow",
    "local_rank": 0,
    "skip_memory_metrics": False,
    "multi_objective_aggregation": "normalize_then_sum",
}


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if entry.kind == "refused"])
def test_a_refused_field_is_refused_by_name_with_what_to_do(name: str) -> None:
    default: Any = GRPOConfig.__dataclass_fields__[name].default
    value = REFUSED.get(name, not default if isinstance(default, bool) else 0.5 if default is None else 2)
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**{name: value})
    assert f"'{name}' = " in str(caught.value)
    assert FIELDS[name].reason in str(caught.value)
    GRPOConfig(**{name: default})


def test_values_that_ask_for_the_default_are_not_refused() -> None:
    GRPOConfig(optim="adamw_torch", tf32=False, debug=[], include_num_input_tokens_seen=False)


@pytest.mark.parametrize("name", [name for name, entry in FIELDS.items() if entry.kind == "without effect"])
def test_a_field_without_effect_changes_nothing(name: str) -> None:
    default = GRPOConfig.__dataclass_fields__[name].default
    value = not default if isinstance(default, bool) else {"a": 1} if default is None else 7
    assert changed({name: value}, {}) == set()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss_type": "sapo"}, "'loss_type' = 'sapo' has no equivalent in dora-rl: choose one of grpo, bnpo"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "set it to 'dapo'"),
        ({"loss_type": "cispo"}, "set it to 1 or more"),
        ({"loss_type": "cispo", "epsilon_high": 5.0, "importance_sampling_level": "sequence"}, "token ratios"),
        ({"scale_rewards": "batch"}, "the nearest is the algorithm 'reinforce_pp_baseline'"),
        ({"scale_rewards": False, "importance_sampling_level": "sequence"}, "'gspo' scales by the group"),
        ({"importance_sampling_level": "word"}, "must be 'token' or 'sequence', not 'word'"),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, "averaged otherwise"),
        ({"delta": 1.1}, "must be above 1 + 'epsilon_high'"),
        ({"beta": 0.1, "importance_sampling_level": "sequence"}, "set it to False"),
        ({"lr_scheduler_type": "polynomial"}, "choose one of constant, constant_with_warmup, linear"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "must have 'min_lr' or 'min_lr_rate'"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2}}, "only 'min_lr' and 'min_lr_rate' are"),
        ({"model_init_kwargs": {"attn_implementation": "eager"}}, "'model_init_kwargs' = {'attn_implementation'"),
        ({"generation_kwargs": {"num_beams": 2}}, "'generation_kwargs' = {'num_beams': 2}"),
        ({"max_completion_length": None}, "must be a number"),
        ({"report_to": "mlflow"}, "'report_to' = 'mlflow'"),
        ({"save_strategy": "best"}, "checkpoints/best"),
        ({"log_level": "critical"}, "choose one of debug"),
        ({"logging_strategy": "epoch"}, "set it to 'steps' or 'no'"),
        ({"eval_strategy": "often"}, "must be 'no', 'steps' or 'epoch'"),
        ({**VLLM, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5}, "None"),
        ({"max_staleness": 1000}, "must be an integer from 0 to 64"),
        ({"dora": {"control.max_stalenes": 1}}, "did you mean 'control.max_staleness'"),
    ],
)
def test_a_value_without_a_translation_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**settings)
    assert sentence in str(caught.value)


def test_an_evaluation_strategy_needs_a_dataset() -> None:
    from dora_rl.trl.mapping import Situation, translate

    with pytest.raises(ConfigError, match="`eval_dataset` is missing: pass one"):
        translate(GRPOConfig(**EVAL), Situation(rows=64))


def test_unknown_and_former_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="no field 'num_generation': did you mean 'num_generations'"):
        GRPOConfig(num_generation=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="no field 'max_prompt_length': TRL has removed it"):
        GRPOConfig(max_prompt_length=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'model_init_kwargs' must be a dict or one in JSON"):
        GRPOConfig(model_init_kwargs="float32")
    assert GRPOConfig("here", 4, model_init_kwargs='{"dtype": "float32"}').model_init_kwargs == {"dtype": "float32"}


def test_the_defaults_are_the_algorithm_of_trl() -> None:
    config = resolved()
    algorithm, optimiser = config.trainer.algorithm, config.trainer.optimiser
    assert (algorithm.name, algorithm.averaging) == ("grpo", "token_mean")
    assert algorithm.bounds == (0.2, 0.2, None)
    assert (algorithm.kl_coefficient, algorithm.correction) == (0.0, "none")
    assert (optimiser.learning_rate, optimiser.betas, optimiser.schedule) == (1e-6, (0.9, 0.999), "linear")
    assert (config.control.group_size, config.control.groups_per_step) == (8, 1)
    assert config.control.steps == optimiser.total_updates == 3 * 64
    assert (config.control.max_staleness, config.seed, config.trainer.precision) == (3, 42, "float32")
    assert config.trainer.gradient_checkpointing
    assert resolved(device="cuda").trainer.precision == "bfloat16"
    assert resolved(balance=0.5).trainer.moe.auxiliary_loss == 0.5
    assert resolved(balance=0.5, router_aux_loss_coef=0.0).trainer.moe.auxiliary_loss == 0.0


def test_a_config_needs_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # any import of them raises
from dora_rl.trl import GRPOConfig
GRPOConfig(beta=0.1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="has no attribute 'SFTTrainer'"):
        dora_rl.trl.SFTTrainer  # noqa: B018


@pytest.mark.filterwarnings("ignore")
def test_command_line_parsers_read_the_config() -> None:
    trl = pytest.importorskip("trl")
    parser = trl.TrlParser((GRPOConfig,))
    line = '--output_dir here --learning_rate 1e-3 --max_staleness 2 --dora {"seed":7} --reward_weights 1 2'
    line += ' --generation_kwargs {"top_k":3} --report_to tensorboard'
    (args,) = parser.parse_args_and_config(line.split())
    config = resolved(**args.to_dict())
    assert (config.control.max_staleness, config.seed, config.sampling.top_k) == (2, 7, 3)
    assert (config.reward.weights, config.logging.tensorboard, config.out) == ([1.0, 2.0], True, "here")
    (args,) = parser.parse_args_and_config(["--max_staleness", "auto", "--scale_rewards", "none"])
    assert resolved(**args.to_dict()).trainer.algorithm.name == "dr_grpo"
    assert args.max_staleness == "auto"


def test_settings_of_dora_come_first() -> None:
    config = resolved(
        learning_rate=1e-3, max_staleness="auto", dora={"trainer": {"optimiser": {"learning_rate": 1e-4}}, "seed": 5}
    )
    assert (config.trainer.optimiser.learning_rate, config.seed, config.control.max_staleness) == (1e-4, 5, "auto")


def test_special_values() -> None:
    assert resolved(max_grad_norm=0).trainer.optimiser.max_gradient_norm is None
    assert resolved(lr_scheduler_type="constant", warmup_steps=5).trainer.optimiser.warmup_updates == 0
    assert resolved(lr_scheduler_type="constant_with_warmup", warmup_steps=0.05).trainer.optimiser.warmup_updates == 10
    assert resolved(scale_rewards=False).trainer.algorithm.name == "dr_grpo"
    assert resolved(loss_type="dr_grpo", max_completion_length=99).trainer.algorithm.constant_length == 99
    assert resolved(loss_type="cispo", epsilon_high=5.0).trainer.algorithm.bounds == (1.0, 4.0, None)
    vllm = resolved(**VLLM).trainer.algorithm
    assert (vllm.correction, vllm.correction_bounds) == ("sequence_mask", (0.0, 3.0))
    assert resolved(**VLLM, vllm_importance_sampling_clip_max=None).trainer.algorithm.correction_bounds[1] > 1e6
    assert resolved(save_strategy="no", max_steps=9).checkpoint.every == 9
    assert resolved(eval_strategy="steps", logging_steps=5).evaluation.every == 5
    assert resolved(max_completion_length=8192).rollout.engine.max_context == 16384
