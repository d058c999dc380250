"""The model card of a policy: what it was trained from and on, how that went, and whether the run kept its promises.

Everything on the card is read from the run directory. Folders of this machine are not on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tomli_w

from dora_rl import __version__
from dora_rl.apps import run_reader
from dora_rl.apps.audit import conclusion
from dora_rl.apps.changed_settings import changed_settings, without_folders
from dora_rl.apps.summary import ACCURACY, REWARD, Summary
from dora_rl.apps.summary_table import accuracy, best, change, duration
from dora_rl.apps.svg_chart import Panel, draw

if TYPE_CHECKING:
    from dora_rl.core.types import Version
    from dora_rl.ledger.audit import Audit
    from dora_rl.runtime.config import RunConfig

CURVES = "curves.svg"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class CardFacts(NamedTuple):
    """What a card is written from."""

    repo: str
    config: RunConfig
    metrics: run_reader.Metrics
    summary: Summary
    audit: Audit
    version: Version
    """The version that is pushed."""
    base_model: str | None
    """Name on the hub, if it is known."""
    merged: bool
    """Whether the weights of the whole model are pushed."""
    adapter: bool
    """Whether a LoRA adapter is pushed, alone or beside the whole model."""


def hub_name(path: str) -> str | None:
    """The name on the hub that a model or dataset was loaded by; None for a file or folder."""
    return path if _HUB_NAME.fullmatch(path) and not path.endswith(".gguf") and not Path(path).exists() else None


def card(facts: CardFacts) -> str:
    """The text of README.md, with its metadata."""
    from huggingface_hub import ModelCard

    metadata = _metadata(facts).to_yaml(line_break="\n")
    text = "\n".join(_text(facts))
    return str(ModelCard(f"---\n{metadata}\n---\n\n{text}"))


def curves(metrics: run_reader.Metrics, summary: Summary) -> str:
    """Reward, held-out accuracy and staleness, as an SVG image."""
    rewards = [(one["version"], one[REWARD]) for one in metrics.steps.values() if REWARD in one]
    accuracies = [(version, one[ACCURACY]) for version, one in metrics.evaluations.items() if ACCURACY in one]
    return draw(
        [
            Panel("mean reward", "version", rewards),
            Panel("held-out accuracy", "version", accuracies, dots=True),
            Panel("trained groups by staleness", "staleness", bars={str(k): v for k, v in summary.staleness.items()}),
        ]
    )


def _metadata(facts: CardFacts) -> Any:
    from huggingface_hub import EvalResult, ModelCardData

    dataset = _dataset(facts.config)
    scored = facts.metrics.evaluations.get(facts.version, {}).get(ACCURACY)
    name = facts.repo.rpartition("/")[2]
    results = EvalResult(
        task_type="text-generation",
        dataset_type=dataset or "held-out",
        dataset_name=f"held-out prompts of {without_folders(facts.config.data.source)}",
        metric_type="accuracy",
        metric_value=None if scored is None else round(scored, 4),
    )
    return ModelCardData(
        base_model=facts.base_model,
        base_model_relation=None if facts.base_model is None else "finetune" if facts.merged else "adapter",
        datasets=None if dataset is None else [dataset],
        library_name="transformers" if facts.merged else "peft",
        pipeline_tag="text-generation",
        tags=["reinforcement-learning", "dora-rl", facts.config.trainer.algorithm.name],
        model_name=name,
        eval_results=None if scored is None else [results],
    )


def _text(facts: CardFacts) -> Iterator[str]:
    summary, config = facts.summary, facts.config
    yield f"# {facts.repo.rpartition('/')[2]}"
    yield ""
    yield (
        f"{_base(facts)} after {facts.version} step{'' if facts.version == 1 else 's'} of reinforcement learning on "
        f"{_source(config)}, with the algorithm {config.trainer.algorithm.name} of dora-rl {__version__}."
    )
    yield f"{_which(facts)}"
    yield ""
    if facts.audit.problems:
        yield "**The audit of this run failed, and the policy was pushed with `--force`: see below.**"
        yield ""
    yield from _loading(facts)
    yield "## Training"
    yield ""
    yield f"![Reward, held-out accuracy and staleness]({CURVES})"
    yield ""
    asked = "" if summary.steps_asked is None else f" of {summary.steps_asked}"
    yield from _table(
        ("", "value"),
        [
            ("base model", facts.base_model or without_folders(config.model.path)),
            ("data", _source(config)),
            ("rewards", ", ".join(without_folders(config.reward.functions)) or "from the environment"),
            ("steps", f"{summary.steps}{asked}, {summary.state}"),
            ("trained tokens", f"{summary.tokens:,}"),
            ("time", duration(summary.seconds)),
            ("reward, first and last step", change(summary.rewards)),
            ("held-out accuracy", accuracy(summary)),
            ("best version", "not evaluated" if summary.best is None else best(summary.best)),
        ],
    )
    yield "## Staleness"
    yield ""
    yield from _staleness(summary)
    yield "## Audit"
    yield ""
    yield from _audit(facts.audit)
    yield "## Settings"
    yield ""
    yield "Those that differ from the defaults; folders are left out of paths."
    yield ""
    yield "```toml"
    yield tomli_w.dumps(changed_settings(config)).rstrip()
    yield "```"
    yield ""


def _base(facts: CardFacts) -> str:
    if facts.base_model is None:
        return f"The model `{without_folders(facts.config.model.path)}`"
    return f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"


def _which(facts: CardFacts) -> str:
    """Which version this is, and its held-out accuracy."""
    found = facts.summary.best
    scored = facts.metrics.evaluations.get(facts.version, {}).get(ACCURACY)
    if found is not None and found[0] == facts.version:
        return f"This is version {facts.version}, the one with the highest held-out accuracy: {found[1]:.1%}."
    held_out = "which was not evaluated" if scored is None else f"with a held-out accuracy of {scored:.1%}"
    return f"This is version {facts.version}, {held_out}."


def _loading(facts: CardFacts) -> Iterator[str]:
    yield "## How to load it"
    yield ""
    yield "```python"
    if facts.merged:
        yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
        yield ""
        yield f'model = AutoModelForCausalLM.from_pretrained("{facts.repo}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{facts.repo}")'
        yield "```"
        if facts.adapter:
            yield ""
            yield "The LoRA adapter is merged into these weights. It is also in the folder `adapter`, for `peft`:"
            yield '`PeftModel.from_pretrained(base, "' + facts.repo + '", subfolder="adapter")`.'
    else:
        base = facts.base_model or without_folders(facts.config.model.path)
        yield "from peft import PeftModel"
        yield "from transformers import AutoModelForCausalLM"
        yield ""
        yield f'base = AutoModelForCausalLM.from_pretrained("{base}")'
        yield f'model = PeftModel.from_pretrained(base, "{facts.repo}")'
        yield "```"
    yield ""


def _staleness(summary: Summary) -> Iterator[str]:
    if summary.mean_staleness is None:
        yield "No group was trained."
        yield ""
        return
    yield (
        "Staleness is the step that trained a group minus the version that sampled it. The bound was "
        f"{summary.max_staleness} (mode `{summary.mode}`); the mean was {summary.mean_staleness:.2f}."
    )
    yield ""
    whole = sum(summary.staleness.values())
    rows = [(str(age), f"{count:,}", f"{count / whole:.1%}") for age, count in summary.staleness.items()]
    yield from _table(("staleness", "groups", "share"), rows)


def _audit(audit: Audit) -> Iterator[str]:
    yield (
        "`dora-rl audit` checks from the ledger of a run that no group was lost or trained twice, that the bound was "
        "kept and that no trajectory mixes versions unless its mode allows that. Its result for this run:"
    )
    yield ""
    yield f"**{conclusion(audit)}**"
    yield ""
    yield from (f"- {problem}" for problem in audit.problems)
    if audit.problems:
        yield ""
    yield from _table(("", "value"), [(figure.name.strip(), without_folders(figure.value)) for figure in audit.figures])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(_cell(one) for one in row)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _source(config: RunConfig) -> str:
    """The data, as the card names it."""
    return f"`{without_folders(config.data.source)}`"


def _dataset(config: RunConfig) -> str | None:
    """The name of the dataset on the hub, if it is one."""
    kind, _, rest = config.data.source.partition(":")
    return hub_name(rest.partition(":")[0]) if kind == "datasets" else None
