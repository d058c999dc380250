"""The checks before a run has a directory: cheap ones first, and nothing that needs torch before the rest is right.

The order: the directory for runs, the data, the files of the model; then a trial call of the user's code in a separate
process, and in parallel the model's configuration, its tokenizer and the lengths of the prompts. Each mistake is
reported in one sentence. What was read is passed on to the run, so that nothing is read twice.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dora_rl.core.errors import ConfigError, DataError, ModelError
from dora_rl.envs.data import Dataset, Problem, load
from dora_rl.envs.user_code import one_line
from dora_rl.models.loading import ModelConfig, check_device, load_tokenizer
from dora_rl.models.text import model_context
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.packages import need_packages
from dora_rl.runtime.run_dir import unwritable
from dora_rl.runtime.supervisor.held_out import held_out_problems
from dora_rl.runtime.tokenization import Tokenization
from dora_rl.runtime.trial import Trial

_MAX_PROMPTS = 1000
"""Prompts that are tokenized to find their length; a long one takes about a millisecond."""


class Prepared(NamedTuple):
    """What the checks have read."""

    tokenization: Tokenization
    dataset: Dataset
    held_out: Sequence[Problem] | None
    """Problems of evaluations; None if the run has no evaluations."""


def check(
    config: RunConfig,
    base: Path,
    *,
    trial: bool = True,
    notify: Callable[[str], None] = lambda _: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Prepared:
    """Check all that can be checked without a run directory; `meanwhile` is called after the quick checks."""
    need_packages()
    check_out(Path(config.out))
    check_trackers(config)
    dataset = load(config.data, base)
    held_out = held_out_problems(config, base, dataset) if config.evaluation.every else None
    check_model_files(config.model)
    remote = config.runtime == "ray" and config.ray.address  # the nodes may have other packages
    running = Trial(config.reward, config.environment, base, dataset.train[0]) if trial and not remote else None
    try:
        meanwhile()
        if not remote:
            check_device(config.model.device)
        text = read_tokenizer(config)
        check_prompts(text, config, [*dataset.train, *(held_out or ())], notify)
        if running is not None:
            running.finish()
    finally:
        if running is not None:
            running.stop()
    return Prepared(text, dataset, held_out)


def check_out(out: Path) -> None:
    """Refuse a directory for runs that can't be made or written; nothing is left behind."""
    existing = out.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        Path(tempfile.mkdtemp(prefix=".dora-rl-", dir=existing)).rmdir()
    except OSError as error:
        raise ConfigError(unwritable(out, error)) from error


def check_trackers(config: RunConfig) -> None:
    """Refuse a tracker whose package is missing."""
    for name in ("wandb", "trackio", "mlflow"):
        if getattr(config.logging, name) is not None and importlib.util.find_spec(name) is None:
            raise ConfigError(f"'logging.{name}': the package is missing: pip install {name}")


def check_model_files(config: ModelConfig) -> None:
    """Refuse a local model with missing files. A name on the hub is left to `transformers`."""
    folder = Path(config.path).expanduser()
    if config.path.endswith(".gguf"):
        if not folder.is_file():
            raise ModelError(f"'model.path': there is no file {config.path}")
        return
    if not folder.exists():
        if config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
            raise ModelError(f"'model.path': there is no folder {config.path}")
        return
    described = folder / "config.json"
    try:
        settings = json.loads(described.read_text())
    except OSError as error:
        raise ModelError(f"'model.path': cannot read {described}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"'model.path': {described} is not JSON: {one_line(error)}") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise ModelError(f"'model.path': {described} has no 'model_type'")
    if not any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin")):
        raise ModelError(f"'model.path': there are no weights (*.safetensors) in {folder}")
    if not any(folder.glob("tokenizer*")):
        raise ModelError(f"'model.path': there is no tokenizer (tokenizer.json) in {folder}")


def read_tokenizer(config: RunConfig) -> Tokenization:
    """The model's tokenizer; an architecture that is not a causal language model of `transformers` is refused."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if not config.model.path.endswith(".gguf"):
        kind = describe(config.model).model_type
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ModelError(f"'model.path': '{kind}' is not a causal language model of transformers")
    return Tokenization(load_tokenizer(config.model), config)


def describe(config: ModelConfig) -> Any:
    """The configuration in the model's files."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(Path(config.path).expanduser()), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"'model.path': cannot load '{config.path}': {one_line(error)}") from error


def check_prompts(
    text: Tokenization, config: RunConfig, problems: Sequence[Problem], notify: Callable[[str], None]
) -> None:
    """Refuse prompts that fill the context; notify the user if the longest responses would not fit after them."""
    first = len(text.encode(problems[0]))  # raises if the prompts are chats and there is no template
    limit = context_limit(config)
    wanted = config.control.max_response_tokens
    # A token has at least one byte, so most prompts are known to be short enough without tokenizing them; the template
    # adds no more tokens than the whole first prompt has.
    doubtful = [problem for problem in problems if _bytes(problem) + first > limit - wanted]
    chosen = doubtful[:: -(-len(doubtful) // _MAX_PROMPTS)] if doubtful else []
    among = f"{len(problems)} prompts" if len(chosen) == len(doubtful) else f"{len(chosen)} prompts that were checked"
    lengths = [(problem, len(text.encode(problem))) for problem in chosen]
    over = [(problem, length) for problem, length in lengths if length >= limit]
    if over:
        row = int(over[0][0].key.partition("-")[0]) + 1
        raise DataError(
            f"{len(over)} of {among} leave no room for a response: the context is {limit} tokens, and the first of "
            f"them (row {row}) has {over[0][1]}; raise 'rollout.engine.max_context' if the model allows, or leave "
            "them out"
        )
    tight = [length for _, length in lengths if length + wanted > limit]
    if tight:
        notify(
            f"note: {len(tight)} of {among} leave less than 'control.max_response_tokens' = {wanted} tokens of the "
            f"context of {limit} for the response; the longest has {max(tight)}"
        )


def context_limit(config: RunConfig) -> int:
    """Tokens of prompt and response together: the limit of the engine, or that of the model if it is lower."""
    limit = config.rollout.engine.max_context
    if config.model.path.endswith(".gguf"):
        return limit
    return min(limit, model_context(describe(config.model)) or limit)


def _bytes(problem: Problem) -> int:
    texts = [problem.prompt] if isinstance(problem.prompt, str) else [one.content for one in problem.prompt]
    return sum(len(text.encode()) for text in texts)
