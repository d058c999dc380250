"""Translates a `GRPOConfig` into settings of dora-rl.

`fields.FIELDS` says which field sets what. Each function below translates the fields of one subject; a value that has
no translation is refused with the name of its field. TRL's defaults are written out, so that a script means the same
algorithm here, whatever our own defaults are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dora_rl.core.config import merge
from dora_rl.core.errors import ConfigError
from dora_rl.trl.schedule import Schedule, schedule

if TYPE_CHECKING:
    from dora_rl.trl.config import GRPOConfig

Settings = dict[str, Any]
"""Values by their dotted names."""

_UNBOUNDED = 1e9
"""A bound that no ratio reaches, for a bound that TRL lets be None."""
_NULLABLE = ("trainer.optimiser.max_gradient_norm",)
"""Settings that are set to None; any other None leaves our default."""
_DEFAULT_CONTEXT = 4096
_DEFAULT_REQUESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the translation depends on beside the `GRPOConfig`."""

    rows: int | None = None
    """Rows of the training dataset; None if their number is not known."""
    evaluates: bool = False
    """Whether there is an evaluation dataset."""
    device: str = "cpu"
    """The device that torch would use."""
    expert_balance: float = 0.0
    """The weight of the load-balancing loss that the model's own config declares."""


def translate(args: GRPOConfig, situation: Situation) -> tuple[dict[str, Any], Schedule]:
    """The settings of a `DoraConfig` and the schedule; `dora` of it comes before what the fields say."""
    own = args.own_settings
    ranks = _ranks(own)
    plan = schedule(args, situation.rows, ranks)
    settings = {
        "out": args.output_dir or "trainer_output",
        "seed": args.seed,
        "data.seed": args.seed,
        "data.shuffle": bool(args.shuffle_dataset),
        "reward.weights": args.reward_weights,
        **_control(args, plan),
        **_model(args, situation),
        **_sampling(args),
        **_rollout(args, situation),
        **_algorithm(args, ranks),
        **_optimiser(args, plan),
        **_evaluation(args, plan, situation),
        **_checkpoints(args, plan),
        **_logging(args, plan),
    }
    tree = merge({}, {name: value for name, value in settings.items() if value is not None or name in _NULLABLE})
    return merge(tree, own), plan


def _ranks(own: Mapping[str, Any]) -> int:
    """The trainer processes, which TRL's batch sizes refer to; a wrong value is refused with the other settings."""
    section = own.get("trainer", {})
    given = section.get("ranks", 1) if isinstance(section, Mapping) else 1
    return given if isinstance(given, int) and given > 0 else 1


def _refuse(field: str, value: object, instead: str) -> ConfigError:
    return ConfigError(f"GRPOConfig: '{field}' = {value!r:.60} has no equivalent in dora-rl: {instead}")


def _control(args: GRPOConfig, plan: Schedule) -> Settings:
    if args.max_completion_length is None:
        raise ConfigError("GRPOConfig: 'max_completion_length' must be a number: every response has a limit")
    return {
        "control.steps": plan.steps,
        "control.groups_per_step": plan.groups_per_step,
        "control.group_size": args.num_generations,
        "control.max_response_tokens": args.max_completion_length,
        "control.max_staleness": args.max_staleness,
        "trainer.mini_batches": plan.mini_batches,
        "trainer.epochs": plan.epochs,
    }


def _model(args: GRPOConfig, situation: Situation) -> Settings:
    device = "cpu" if args.use_cpu else situation.device
    given = dict(args.model_init_kwargs or {}) if not isinstance(args.model_init_kwargs, str) else {}
    dtype = given.pop("dtype", given.pop("torch_dtype", None))
    if given:
        name = next(iter(given))
        raise _refuse("model_init_kwargs", {name: given[name]}, "only 'dtype' is: set 'model' in `dora`")
    half = args.bf16 if args.bf16 is not None else device == "cuda"
    recompute = args.activation_checkpointing
    coefficient = args.router_aux_loss_coef
    return {
        "model.device": device,
        "model.dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "trainer.precision": "bfloat16" if half else "float32",
        "trainer.gradient_checkpointing": args.gradient_checkpointing if recompute is None else recompute,
        "trainer.moe.auxiliary_loss": situation.expert_balance if coefficient is None else coefficient,
    }


_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_STOPS = ("stop", "stop_strings")


def _sampling(args: GRPOConfig) -> Settings:
    given = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
    unknown = [name for name in given if name not in (*_SAMPLING, *_STOPS)]
    if unknown:
        raise _refuse("generation_kwargs", {unknown[0]: given[unknown[0]]}, "the settings of `sampling` are all")
    values = {name: given.get(name, getattr(args, name)) for name in _SAMPLING}
    stops = next((given[name] for name in _STOPS if name in given), None)
    return {
        **{f"sampling.{ours}": values[name] for name, ours in _SAMPLING.items()},
        "sampling.stop": (stops,) if isinstance(stops, str) else None if stops is None else tuple(stops),
        "evaluation.temperature": values["temperature"],
    }


def _rollout(args: GRPOConfig, situation: Situation) -> Settings:
    longest = args.max_completion_length or 0
    context = args.vllm_max_model_length or max(_DEFAULT_CONTEXT, 2 * longest)
    settings: Settings = {
        "rollout.engine.max_context": context,
        "rollout.engine.max_requests": max(_DEFAULT_REQUESTS, args.num_generations or 1),
    }
    if not args.use_vllm:
        return settings
    share = args.vllm_gpu_memory_utilization
    on_gpu = situation.device == "cuda" and not args.use_cpu
    return settings | {
        "rollout.engine.kind": "vllm",
        "rollout.engine.vllm.tensor_parallel_size": args.vllm_tensor_parallel_size,
        "rollout.engine.vllm.gpu_memory_utilization": share if on_gpu else None,
        "rollout.engine.vllm.arguments": None
        if args.vllm_model_impl == "vllm"
        else {"model_impl": args.vllm_model_impl},
    }


# -- the objective --------------------------------------------------------------------------------------------------

_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant_length",
}


def _algorithm(args: GRPOConfig, ranks: int) -> Settings:
    loss = args.loss_type
    if loss not in _AGGREGATIONS:
        raise _refuse("loss_type", loss, f"choose one of {', '.join(_AGGREGATIONS)}")
    if loss == "bnpo" and args.gradient_accumulation_steps * ranks > 1:
        raise _refuse("loss_type", loss, "the average never depends on how a batch is divided: set it to 'dapo'")
    aggregation = _AGGREGATIONS[loss]
    settings = {
        "name": _name(args),
        "aggregation": aggregation,
        "constant_length": args.max_completion_length if aggregation == "constant_length" else None,
        **_bounds(args),
        "kl_coefficient": args.beta,
        "kl_ratio": _kl_ratio(args),
        "entropy_coefficient": args.entropy_coef,
        **_correction(args),
    }
    if args.entropy_coef and aggregation != "token_mean":
        raise _refuse("entropy_coef", args.entropy_coef, f"the bonus of '{loss}' is averaged otherwise: use 'dapo'")
    return {f"trainer.algorithm.{name}": value for name, value in settings.items()}


def _name(args: GRPOConfig) -> str:
    """The algorithm with TRL's advantage and loss; its other defaults are all set by the caller."""
    given: Any = args.scale_rewards  # TRL takes True and False too
    scale = given if isinstance(given, str) else "group" if given else "none"
    if scale not in ("group", "none"):
        raise _refuse("scale_rewards", args.scale_rewards, "the nearest is the algorithm 'reinforce_pp_baseline'")
    level = args.importance_sampling_level
    if level not in ("token", "sequence"):
        raise ConfigError(f"GRPOConfig: 'importance_sampling_level' must be 'token' or 'sequence', not {level!r}")
    if args.loss_type == "cispo" and level == "sequence":
        raise _refuse("importance_sampling_level", level, "'cispo' has token ratios: choose another `loss_type`")
    special = "cispo" if args.loss_type == "cispo" else "gspo" if level == "sequence" else None
    if special and scale == "none":
        raise _refuse("scale_rewards", args.scale_rewards, f"'{special}' scales by the group: set it to 'group'")
    return special or ("grpo" if scale == "group" else "dr_grpo")


def _bounds(args: GRPOConfig) -> Settings:
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo":
        if high < 1:
            raise ConfigError(
                "GRPOConfig: 'epsilon_high' is the bound of the ratio itself with `loss_type` 'cispo': set it to 1 or "
                "more, such as 5.0"
            )
        return {"clip_low": 1.0, "clip_high": high - 1}  # the ratio has no lower bound
    if args.delta is not None and args.delta <= 1 + high:
        raise ConfigError(f"GRPOConfig: 'delta' = {args.delta} must be above 1 + 'epsilon_high' = {1 + high}")
    return {"clip_low": args.epsilon, "clip_high": high, "clip_negative": args.delta}


def _kl_ratio(args: GRPOConfig) -> bool:
    if not (args.beta and args.use_bias_correction_kl):
        return False
    if args.importance_sampling_level == "sequence":
        raise _refuse(
            "use_bias_correction_kl", True, "with ratios of sequences the KL term is not weighted: set it to False"
        )
    return True


def _correction(args: GRPOConfig) -> Settings:
    if not (args.use_vllm and args.vllm_importance_sampling_correction):
        return {}
    mode = args.vllm_importance_sampling_mode
    if mode not in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        raise ConfigError(f"GRPOConfig: 'vllm_importance_sampling_mode' = {mode!r} is not a mode of TRL")
    low, cap = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_cap
    high = args.vllm_importance_sampling_clip_max if cap is None else cap
    if mode.endswith("truncate") and low is not None:
        raise _refuse("vllm_importance_sampling_clip_min", low, f"'{mode}' has an upper bound only: set it to None")
    return {
        "correction": mode,
        "correction_low": None if mode.endswith("truncate") else low or 0.0,
        "correction_high": _UNBOUNDED if high is None else high,
    }


# -- the optimiser --------------------------------------------------------------------------------------------------

_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def _optimiser(args: GRPOConfig, plan: Schedule) -> Settings:
    kind = args.lr_scheduler_type
    if kind not in _SCHEDULES:
        raise _refuse("lr_scheduler_type", kind, f"choose one of {', '.join(_SCHEDULES)}")
    # transformers' `constant` has no warm-up, whatever `warmup_steps` says.
    warmup = 0 if kind == "constant" or not args.warmup_steps else plan.in_updates("warmup_steps", args.warmup_steps)
    settings = {
        "learning_rate": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "epsilon": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "warmup_updates": warmup,
        "schedule": _SCHEDULES[kind],
        "total_updates": None if _SCHEDULES[kind] == "constant" else plan.updates,
        "final_share": _final_share(args),
        "max_gradient_norm": args.max_grad_norm or None,
    }
    return {f"trainer.optimiser.{name}": value for name, value in settings.items()}


def _final_share(args: GRPOConfig) -> float:
    given = dict(args.lr_scheduler_kwargs) if isinstance(args.lr_scheduler_kwargs, Mapping) else {}
    lowest = given.pop("min_lr", None)
    share = given.pop("min_lr_rate", None if lowest is None else lowest / args.learning_rate)
    if given:
        raise _refuse("lr_scheduler_kwargs", args.lr_scheduler_kwargs, "only 'min_lr' and 'min_lr_rate' are")
    if (args.lr_scheduler_type == "cosine_with_min_lr") != (share is not None):
        raise ConfigError(
            "GRPOConfig: 'lr_scheduler_kwargs' must have 'min_lr' or 'min_lr_rate' with `lr_scheduler_type` "
            "'cosine_with_min_lr', and only then"
        )
    return share or 0.0


# -- evaluation, checkpoints, logs ----------------------------------------------------------------------------------


def _evaluation(args: GRPOConfig, plan: Schedule, situation: Situation) -> Settings:
    samples = args.num_generations_eval or args.num_generations
    if args.eval_strategy == "no":
        return {"evaluation.samples": samples}
    if args.eval_strategy not in ("steps", "epoch"):
        raise ConfigError(f"GRPOConfig: 'eval_strategy' must be 'no', 'steps' or 'epoch', not {args.eval_strategy!r}")
    if not situation.evaluates:
        raise ConfigError("`eval_dataset` is missing: pass one, or set 'eval_strategy' = 'no'")
    every = (
        plan.epoch_in_steps("eval_strategy")
        if args.eval_strategy == "epoch"
        else plan.in_steps("eval_steps", args.eval_steps or args.logging_steps)  # as in transformers
    )
    return {"evaluation.samples": samples, "evaluation.every": every}


def _checkpoints(args: GRPOConfig, plan: Schedule) -> Settings:
    match args.save_strategy:
        case "no":
            every = plan.steps  # the one at the end, which has the policy
        case "epoch":
            every = plan.epoch_in_steps("save_strategy")
        case "steps":
            every = plan.in_steps("save_steps", args.save_steps)
        case "best":
            raise _refuse("save_strategy", "best", "the best policy is kept in `checkpoints/best`: set it to 'steps'")
        case other:
            raise ConfigError(f"GRPOConfig: 'save_strategy' must be 'no', 'steps' or 'epoch', not {other!r}")
    keep = args.save_total_limit or plan.steps // every + 2  # TRL keeps all if there is no limit
    return {"checkpoint.every": every, "checkpoint.keep": keep}


_LEVELS = ("debug", "info", "warning", "error")


def _logging(args: GRPOConfig, plan: Schedule) -> Settings:
    wanted = args.report_to or "none"
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    names = [] if names == ["none"] else names
    for name in names:
        if name not in ("tensorboard", "wandb", "trackio"):
            raise _refuse("report_to", name, "choose from 'none', 'tensorboard', 'wandb' and 'trackio'")
    if args.log_level != "passive" and args.log_level not in _LEVELS:
        raise _refuse("log_level", args.log_level, f"choose one of {', '.join(_LEVELS)}, passive")
    if args.logging_strategy not in ("steps", "no"):
        raise _refuse("logging_strategy", args.logging_strategy, "set it to 'steps' or 'no'")
    samples = None
    if args.log_completions:
        shown = args.num_completions_to_print
        samples = plan.groups_per_step if shown is None else -(-shown // (args.num_generations or 1))
    return {
        "logging.level": None if args.log_level == "passive" else args.log_level,
        "logging.tensorboard": "tensorboard" in names,
        "logging.wandb": os.environ.get("WANDB_PROJECT", args.project) if "wandb" in names else None,
        "logging.trackio": args.project if "trackio" in names else None,
        "logging.samples": samples,
    }
