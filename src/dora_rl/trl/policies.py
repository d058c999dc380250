"""Models and policies of a `GRPOTrainer`: what a model's config says, and what a run leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from dora_rl.api.inputs import data_source
from dora_rl.api.run import Run
from dora_rl.apps import run_reader
from dora_rl.apps.evaluate import Evaluation, respond, summary
from dora_rl.core.errors import UserError
from dora_rl.envs.config import DataConfig
from dora_rl.runtime.run_dir import RunDir


def model_config(model: Any) -> Any | None:
    """The config of a model, by the module or its name; None if it can't be read, which the run reports later."""
    if not isinstance(model, str | Path):
        return getattr(model, "config", None)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(model), trust_remote_code=False)
    except (OSError, ValueError):
        return None


def given_tokenizer(model: Any, tokenizer: Any) -> Any | None:
    """The tokenizer to store with the model; None if it is the one that the model has already.

    Scripts often pass the tokenizer of the model's own name; then there is nothing to store. The padding token, which
    they set for TRL, is not used. A model in memory without a tokenizer gets that of its name, as in TRL.
    """
    in_memory = not isinstance(model, str | Path)
    if in_memory == (tokenizer is not None):
        return tokenizer
    from transformers import AutoTokenizer

    name = getattr(getattr(model, "config", None), "_name_or_path", "") if in_memory else str(model)
    try:
        own = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):
        if in_memory:
            raise UserError("the model in memory has no tokenizer: pass `processing_class`") from None
        return tokenizer
    if in_memory:
        return own
    return None if _identity(own) == _identity(tokenizer) else tokenizer


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    return (tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.chat_template)


def newest_run(folder: Path) -> Run:
    """The newest run in a folder."""
    found = [path.parent for path in folder.glob("*/config.json") if run_reader.is_run(path.parent)]
    if not found:
        raise UserError(f"there is no run to resume in '{folder}'")
    return Run.open(max(found, key=lambda path: ((path / "config.json").stat().st_mtime_ns, path.name)))


def save_policy(policy: Path, target: Path) -> None:
    """Copy a policy to a folder: the adapter if one was trained, otherwise the weights; and the tokenizer."""
    adapter = policy.parent / "adapter"
    source = adapter if adapter.is_dir() else policy
    target.mkdir(parents=True, exist_ok=True)
    for file in (*policy.glob("*token*"), *policy.glob("chat_template*"), *source.iterdir()):
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def evaluate_run(run: Run, rows: Any) -> tuple[int, dict[str, float]]:
    """The version of the newest policy, and its metrics on these rows under TRL's names."""
    folder = RunDir.open(run.path)
    config = folder.read()
    policies = run_reader.policies(folder)
    if not policies:
        raise UserError(f"{run.path} has no policy yet")
    version = max(policies)
    columns: dict[str, Any] = {name: getattr(config.data, name) for name in ("prompt", "answer", "system")}
    file = folder.inputs / "evaluate.jsonl"
    source = data_source(rows, file, columns, "eval_dataset")
    data = DataConfig(source=source, **columns)
    settings = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"data": data})})
    evaluation = Evaluation(settings, folder.base(), policies[version], version, file)
    samples = config.evaluation.samples
    found = summary(respond(evaluation, samples), config.evaluation.success_threshold, samples)
    return version, {
        "eval_reward": found["reward"],
        "eval_accuracy": found["accuracy"],
        "eval_completions/mean_length": found["mean_tokens"],
        "eval_failed": float(found["failed"]),
    }
