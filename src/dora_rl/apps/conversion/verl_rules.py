"""Rules of verl's table that look at several fields, or need more than a line."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dora_rl.apps.conversion.translation import Fields, Mapped, Outcome, Rule, Same, Unmapped, held_out, whole
from dora_rl.core.errors import ConfigError

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
OPTIM = f"{ACTOR}.optim"
ALGORITHM = "trainer.algorithm"
_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}


def groups(fields: Fields) -> int:
    """Groups of a step: between two publications of weights."""
    if _is_fully_async(fields):
        return _fetches(fields) * int(fields[f"{ACTOR}.ppo_mini_batch_size"])
    return int(fields["data.train_batch_size"])


def _mini_batches(fields: Fields) -> int:
    if _is_fully_async(fields):
        return _fetches(fields)
    mini = int(fields[f"{ACTOR}.ppo_mini_batch_size"])
    return 1 if mini >= groups(fields) else whole(groups(fields), mini, "the mini-batches of a step")


def _fetches(fields: Fields) -> int:
    """Mini-batches between two publications, in `fully_async_policy`."""
    every = int(fields.get("async_training.trigger_parameter_sync_step") or 4)
    return every * int(fields.get("async_training.require_batches") or 1)


def _is_fully_async(fields: Fields) -> bool:
    return any(name.startswith("async_training.") for name in fields)


def _updates(steps: float, fields: Fields) -> int:
    """Optimiser updates in a number of training steps."""
    return max(1, round(steps * _mini_batches(fields) * int(fields.get(f"{ACTOR}.ppo_epochs") or 1)))


def _steps(fields: Fields) -> int | None:
    for name in ("trainer.total_training_steps", f"{OPTIM}.total_training_steps"):
        value = fields.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None


def batch_size(_: Any, fields: Fields) -> Outcome:
    if _is_fully_async(fields):
        return Same("fully_async_policy does not use it")
    return Mapped({"control.groups_per_step": groups(fields)})


def mini_batch_size(_: Any, fields: Fields) -> Outcome:
    found: dict[str, Any] = {"control.groups_per_step": groups(fields)} if _is_fully_async(fields) else {}
    try:
        return Mapped({**found, "trainer.mini_batches": _mini_batches(fields)})
    except ConfigError as error:
        return Unmapped(f"{error}; the nearest setting is 'trainer.mini_batches'")


def files(key: str) -> Rule:
    def rule(value: Any, _: Fields) -> Outcome:
        names = value if isinstance(value, list) else [value]
        if value is None or not names:
            return Same("unset")
        remark = "" if len(names) == 1 else f"a run has one source: join the other {len(names) - 1} to it"
        return Mapped({key: str(Path(str(names[0])).expanduser())}, remark)

    return rule


def context(value: Any, fields: Fields) -> Outcome:
    if fields.get(f"{ROLLOUT}.max_model_len"):
        return Same("max_model_len is set")
    return Mapped({"rollout.engine.max_context": int(value) + int(fields["data.max_response_length"])})


def estimator(value: Any, fields: Fields) -> Outcome:
    loss = fields.get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla"
    if value not in _ESTIMATORS:
        return Unmapped(
            f"there is no '{value}' here (no critic is trained): 'trainer.algorithm.name' stays grpo; others are rloo, "
            "reinforce_pp and dapo"
        )
    name = _ESTIMATORS[value]
    if name == "grpo" and fields.get("algorithm.norm_adv_by_std_in_grpo") is False:
        name = "dr_grpo"
    if loss in ("gspo", "cispo") and name == "grpo":
        name = loss
    return Mapped({f"{ALGORITHM}.name": name})


def critic(_: Any, fields: Fields) -> Outcome:
    """A critic is there for `gae` only."""
    if fields["algorithm.adv_estimator"] == "gae":
        return Unmapped("no critic is trained")
    return Same("no critic is used")


def of_another_loss(_: Any, fields: Fields) -> Outcome:
    """A parameter of a loss mode that dora-rl does not have."""
    if (fields.get(f"{ACTOR}.policy_loss.loss_mode") or "vanilla") in ("vanilla", "gspo", "cispo"):
        return Same("not used by this loss mode")
    return Unmapped("it belongs to a loss mode that dora-rl does not have")


def loss_mode(value: Any, fields: Fields) -> Outcome:
    if value in ("vanilla", None):
        return Same("the clip of PPO, as here")
    if value in ("gspo", "cispo") and _ESTIMATORS.get(fields["algorithm.adv_estimator"]) == "grpo":
        return Mapped({f"{ALGORITHM}.name": value})
    return Unmapped(
        "the nearest settings are 'trainer.algorithm.name' (gspo, cispo) and 'trainer.algorithm.trust_region'"
    )


def _own_bounds(fields: Fields) -> bool:
    return fields.get(f"{ACTOR}.policy_loss.loss_mode") in ("gspo", "cispo")


def clip_both(value: Any, fields: Fields) -> Outcome:
    given = [f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"]
    if all(fields.get(one) is not None for one in given):
        return Same("clip_ratio_low and clip_ratio_high are set")
    keys = [key for key, one in zip(("clip_low", "clip_high"), given, strict=True) if fields.get(one) is None]
    return Mapped({f"{ALGORITHM}.{key}": float(value) for key in keys})


def dual_clip(value: Any, fields: Fields) -> Outcome:
    if value is None or _own_bounds(fields):
        return Same("the loss has no such bound")
    return Mapped({f"{ALGORITHM}.clip_negative": float(value)})


def aggregation(value: Any, fields: Fields) -> Outcome:
    if fields.get(f"{ACTOR}.policy_loss.loss_mode") == "gspo":
        return Mapped({f"{ALGORITHM}.aggregation": "sequence_mean"})
    plain = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    if value in plain:
        return Mapped({f"{ALGORITHM}.aggregation": plain[value]})
    if value == "seq-mean-token-sum-norm":
        length = int(fields.get(f"{ACTOR}.loss_scale_factor") or fields["data.max_response_length"])
        return Mapped({f"{ALGORITHM}.aggregation": "constant_length", f"{ALGORITHM}.constant_length": length})
    return Unmapped("the nearest setting is 'trainer.algorithm.aggregation' = \"constant_length\", up to a factor")


def schedule(value: Any, fields: Fields) -> Outcome:
    if value in (None, "constant"):
        return Same("constant, as here")
    steps = _steps(fields)
    if value not in ("cosine", "linear") or steps is None:
        return Unmapped("'trainer.optimiser.schedule' needs 'trainer.optimiser.total_updates': set both")
    end = {"schedule": value, "total_updates": _updates(steps, fields)}
    return Mapped({f"trainer.optimiser.{key}": one for key, one in end.items()})


def warmup(value: Any, fields: Fields) -> Outcome:
    if value is None or value <= 0:
        return Same("no warm-up, or one by the other field")
    return Mapped({"trainer.optimiser.warmup_updates": _updates(value, fields)})


def warmup_share(value: Any, fields: Fields) -> Outcome:
    steps, given = _steps(fields), fields.get(f"{OPTIM}.lr_warmup_steps")
    if not value or (given is not None and given > 0):
        return Same("no warm-up, or one by lr_warmup_steps")
    if steps is None:
        return Unmapped("a share of an unknown number of steps: set 'trainer.optimiser.warmup_updates'")
    return Mapped({"trainer.optimiser.warmup_updates": _updates(value * steps, fields)})


def micro_batch(value: Any, fields: Fields) -> Outcome:
    if value is None or fields.get(f"{ACTOR}.use_dynamic_bsz"):
        return Same("unset, or use_dynamic_bsz is on")
    longest = int(fields["data.max_prompt_length"]) + int(fields["data.max_response_length"])
    return Mapped({"trainer.micro_batch_tokens": int(value) * longest})


def reward_function(value: Any, fields: Fields) -> Outcome:
    if value is None:
        return Same("unset")
    prefix = "reward." if "reward.custom_reward_function.path" in fields else ""
    name = fields.get(f"{prefix}custom_reward_function.name") or "compute_score"
    return Mapped({"reward.functions": [f"{value}:{name}"]})


def logger(value: Any, fields: Fields) -> Outcome:
    names = value if isinstance(value, list) else [value]
    project = str(fields.get("trainer.project_name") or "verl_examples")
    found: dict[str, Any] = {f"logging.{one}": project for one in ("wandb", "trackio", "mlflow") if one in names}
    found["logging.tensorboard"] = "tensorboard" in names
    lost = [one for one in names if one not in ("console", "wandb", "trackio", "mlflow", "tensorboard", "file")]
    return Mapped(found, f"there is no tracker '{lost[0]}'" if lost else "")


def engine(value: Any, _: Fields) -> Outcome:
    return Unmapped(
        f"the built-in engine is used in place of '{value}'; for vLLM: pip install 'dora-rl[vllm]' and "
        "'rollout.engine.kind' = \"vllm\""
    )


def threshold(value: Any, _: Fields) -> Outcome:
    remark = (
        "verl limits the share of stale samples, dora-rl the staleness of each group: choose 'control.max_staleness', "
        "see docs/from-verl.md"
    )
    return Mapped({"control.mode": "dora", "control.max_staleness": max(0, math.ceil(float(value)))}, remark)


def greedy_evaluation(value: Any, fields: Fields) -> Outcome:
    sampled = fields.get(f"{ROLLOUT}.val_kwargs.do_sample", False)
    return Mapped({"evaluation.temperature": float(value) if sampled else 0.0})


def evaluated_prompt(value: Any, fields: Fields) -> Outcome:
    keys = ["data.prompt", *(["evaluation.data.prompt"] if fields.get("data.val_files") else [])]
    return Mapped(dict.fromkeys(keys, value))


def positive(key: str, otherwise: str) -> Rule:
    return lambda value, _: Mapped({key: int(value)}) if value and int(value) > 0 else Same(otherwise)


def finish(fields: Fields, there: Collection[str]) -> Iterator[Mapped]:
    main = str(fields.get("main") or "")
    if "control.mode" not in there:
        one_step = "one_step_off" in main or any(name.startswith("rollout.") for name in fields)
        mode = "one_step_off" if one_step and not _is_fully_async(fields) else "sync"
        said = {
            "sync": 'main_ppo is synchronous; mode "dora" does not wait, see docs/from-verl.md',
            "one_step_off": "one_step_off_policy is one step behind; mode \"dora\" takes any 'max_staleness'",
        }
        yield Mapped({"control.mode": "dora" if _is_fully_async(fields) else mode}, said[mode])
    if "reward.functions" not in there:
        data = str(fields.get("data.train_files") or "").lower()
        guess = "number" if "gsm8k" in data else "math" if "math" in data or "aime" in data else "exact"
        yield Mapped(
            {"reward.functions": [guess]},
            "a guess: verl chooses the function by the column data_source; name what a response is worth",
        )
    yield from held_out(there)
    if "model.device" not in there:
        yield Mapped({"model.device": "cpu"}, 'verl\'s default is cuda: set "cuda" on a machine with GPUs')
