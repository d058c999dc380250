"""Translates a `LoraConfig` of peft into `trainer.lora`; every field without an equivalent is refused by name."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from dora_rl.core.errors import ConfigError

_MAPPED = ("r", "lora_alpha", "target_modules")
_IDLE = (
    "task_type",  # always a causal language model
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",  # the model of the run
    "revision",
    "inference_mode",
    "fan_in_fan_out",  # peft corrects it to what the layer needs
    "qalora_group_size",  # only `use_qalora` reads it
    "megatron_core",  # only `megatron_config` reads it
    "runtime_config",  # where peft computes, not what
)
"""Fields that can't change the adapter that is trained."""


def lora_settings(config: Any, model_type: str | None) -> dict[str, Any]:
    """The section `trainer.lora`; `model_type` is that of the model's config, for peft's default targets."""
    if type(config).__name__ != "LoraConfig" or not hasattr(config, "lora_alpha"):
        raise ConfigError(f"`peft_config` must be a LoraConfig of peft, not {type(config).__name__}")
    for each in fields(config):
        if each.name in (*_MAPPED, *_IDLE):
            continue
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        value = getattr(config, each.name)
        if value != default:
            raise ConfigError(
                f"LoraConfig: '{each.name}' = {value!r:.60} has no equivalent in dora-rl: an adapter has 'r', "
                "'lora_alpha' and 'target_modules'"
            )
    alpha = config.lora_alpha
    if alpha != int(alpha):
        raise ConfigError(f"LoraConfig: 'lora_alpha' must be a whole number, not {alpha}")
    return {"rank": config.r, "alpha": int(alpha), "targets": _targets(config.target_modules, model_type)}


def _targets(given: Any, model_type: str | None) -> str | list[str]:
    if given == "all-linear":
        return "all-linear"
    if isinstance(given, str):
        raise ConfigError(
            f"LoraConfig: 'target_modules' = {given!r:.60} is a pattern: list the names of the modules, or set "
            "'all-linear'"
        )
    if given is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults  # noqa: N811

        if model_type not in defaults:
            raise ConfigError(f"LoraConfig: set 'target_modules': peft has no default for a model of type {model_type}")
        given = defaults[model_type]
        if isinstance(given, str):
            return _targets(given, model_type)
    return sorted(given)
