"""The command `dora-rl`.

The module of a command is imported only when that command is given, so that `--help` and error messages do not wait for
imports of other commands.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from dora_rl.core.errors import DoraError, IntegrityError, RunError, UserError


class _Command(NamedTuple):
    target: str
    """`module:function` in `dora_rl.apps`."""
    about: str
    """The first sentence of the function's docstring."""
    settings: bool = False
    """Whether it takes the settings of a run as options."""


COMMANDS = {
    "init": _Command("init:init", "Write a config file: a short one to start with, or one with every setting."),
    "convert": _Command(
        "convert:convert", "Translate a config of verl or prime-rl, and name every field that has no counterpart."
    ),
    "train": _Command("train:train", "Train a model with reinforcement learning.", settings=True),
    "quickstart": _Command(
        "quickstart:quickstart", "Train the small model that comes with the package, in a few minutes.", settings=True
    ),
    "eval": _Command("evaluate:evaluate", "Evaluate a run's policy, or a model, on held-out prompts."),
    "runs": _Command("runs:runs", "List runs: their progress, reward and accuracy, and whether they are running."),
    "watch": _Command(
        "watch:watch",
        "Show the progress of a run that another process runs, until it ends; Ctrl-C leaves the run alone.",
    ),
    "compare": _Command(
        "compare:compare",
        "Compare runs: the settings in which they differ, and their speed, staleness, reward and accuracy.",
    ),
    "report": _Command(
        "report:report", "Write the report page of a run: curves, lengths, staleness, timeline, samples."
    ),
    "export": _Command(
        "export:export",
        "Export a run: a Perfetto trace of its timeline, or its metrics, groups and trajectories as CSV files.",
    ),
    "serve": _Command("serve.command:serve", "Serve a live page about a run, or about all runs in a folder."),
    "audit": _Command(
        "audit:audit",
        "Check from its ledger that a run lost no group, trained none twice, kept the bound and mixed no versions.",
    ),
    "push": _Command("push:push", "Push a run's policy to the Hugging Face Hub, with a model card."),
    "scale": _Command("scale:scale", "Change the number of rollout instances."),
    "generate": _Command(
        "generate:generate", "Complete prompts in batches; writes JSONL with text, tokens and log-probs."
    ),
    "sft": _Command(
        "sft:sft", "Fine-tune a model on prompts and completions, as a warm start for reinforcement learning."
    ),
    "sim": _Command(
        "simulate:sim",
        "Simulate a cluster and compare modes, with the orchestrator that real runs use.",
    ),
    "plan": _Command(
        "simulate:plan_command",
        "Find the best K, instance size, slots and split between training and rollout for a cluster and a trace.",
    ),
}


def load(name: str) -> Any:
    """The command of this name, with its module imported."""
    from dora_rl.apps.config_options import SettingsCommand

    command = COMMANDS[name]
    module, _, function = command.target.partition(":")
    one = typer.Typer(add_completion=False)
    kind = SettingsCommand if command.settings else None
    one.command(name, cls=kind)(getattr(importlib.import_module(f"dora_rl.apps.{module}"), function))
    return typer.main.get_command(one)


class _Group(TyperGroup):
    """Lists all commands with one line each; loads only the one that is given."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else command, rest


app = typer.Typer(
    name="dora-rl",
    help="Multi-version asynchronous reinforcement learning for language models.",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    from dora_rl import __version__

    if wanted:
        sys.stdout.write(f"{__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-version asynchronous reinforcement learning for language models."""


for _name, _command in COMMANDS.items():
    app.command(_name, help=_command.about)(lambda: None)


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def main() -> None:
    """Entry point: a user's mistake is reported in one sentence on stderr, with exit code 2."""
    try:
        app()
    except UserError as error:
        _print_error(error)
        sys.exit(2)
    except (RunError, IntegrityError) as error:
        _print_error(error)
        sys.exit(1)


def _print_error(error: DoraError) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"dora-rl: {error}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
