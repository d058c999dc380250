"""Checks of what a script passes to `GRPOTrainer`, before a run exists."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from dora_rl.core.errors import UserError
from dora_rl.envs.builtins import NAMES as BUILTIN_REWARDS

_REFUSED = {
    "reward_processing_classes": "dora-rl has no reward models: write a reward function that calls yours",
    "quantization_config": "weights are trained in float32: pass a `peft_config` to train fewer of them",
    "tools": "tools are an environment of dora-rl: `dora={'environment.kind': 'FILE.py:Class'}` (docs/tasks.md)",
    "rollout_func": "an environment takes its place: `dora={'environment.kind': 'FILE.py:Class'}` (docs/tasks.md)",
    "environment_factory": "an environment has `reset` and `step` here: `dora={'environment.kind': 'FILE.py:Class'}` "
    "(docs/tasks.md)",
}


def refuse_arguments(given: Mapping[str, Any]) -> None:
    for name, reason in _REFUSED.items():
        if given[name] is not None:
            raise UserError(f"GRPOTrainer: `{name}` has no equivalent in dora-rl: {reason}")
    if any(one is not None for one in given["optimizers"]):
        raise UserError("GRPOTrainer: `optimizers` has no equivalent in dora-rl: AdamW is set by the fields of `args`")
    if given["train_dataset"] is None:
        raise UserError("GRPOTrainer: `train_dataset` is missing")


def refuse_launchers() -> None:
    if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
        raise UserError(
            "this script was started in several processes, and each would start a run: start it once, with `python`; "
            "`dora={'trainer.ranks': N}` trains with several processes"
        )


def reward_functions(given: Any) -> list[Any]:
    functions = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for one in functions:
        known = isinstance(one, str) and (one in BUILTIN_REWARDS or ":" in one)
        if (isinstance(one, str) and not known) or hasattr(one, "save_pretrained"):
            name = one if isinstance(one, str) else type(one).__name__
            raise UserError(
                f"`reward_funcs`: '{name}' is a reward model, and dora-rl has none: pass a function that calls it, or "
                f"the name of a built-in reward ({', '.join(BUILTIN_REWARDS)})"
            )
        state = None if isinstance(one, str) or not callable(one) else _parameters(one).get("trainer_state")
        if state is not None and state.default is inspect.Parameter.empty:
            raise UserError(
                f"`reward_funcs`: {getattr(one, '__name__', one)!s:.60} needs `trainer_state`, which reward workers "
                "don't have: give the parameter a default, and do not depend on the progress of training"
            )
    return list(functions)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def row_count(dataset: Any, data: Mapping[str, Any]) -> int | None:
    """The rows that are trained, with these settings of the data; None if their number is not known."""
    if not isinstance(dataset, Sized) or isinstance(dataset, str | Mapping):
        return None
    rows = min(len(dataset), data.get("limit") or len(dataset))
    return rows - int(data.get("held_out", 0))


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def short_name(model: Any) -> str:
    name = model if isinstance(model, str | Path) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(str(name)).name or "model"


def difference(wanted: Mapping[str, Any], found: Mapping[str, Any], at: str = "") -> tuple[str, Any, Any] | None:
    """The first setting that differs, with both values; what is stored may have more settings, and `out` may move."""
    for key, value in wanted.items():
        name, there = f"{at}{key}", found.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            deeper = difference(value, there, f"{name}.")
            if deeper is not None:
                return deeper
        elif name != "out" and value != there and not (isinstance(value, tuple) and list(value) == there):
            return name, value, there
    return None
