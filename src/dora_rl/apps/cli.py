"""The command `dora-rl`.

A command's module is imported when the command is given, so that `--help`, and the mistakes of one command, do not wait
for what the others need.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from dora_rl.core.errors import DoraError, IntegrityError, RunError, UserError


class _Command(NamedTuple):
    place: str
    """`module:function` in `dora_rl.apps`."""
    about: str
    """The first line of the function's description."""
    settings: bool = False
    """It takes the settings of a run as options."""


COMMANDS = {
    "init": _Command("init:init", "Write a config file: a short one to begin with, or with every setting."),
    "train": _Command("train:train", "Train a model with reinforcement learning.", settings=True),
    "eval": _Command("evaluate:evaluate", "Evaluate a run's policy, or a model, on held-out prompts."),
    "runs": _Command("runs:runs", "List runs: how far they are, what they reached, and whether they go on."),
    "report": _Command("report:report", "Write the page about a run: curves, lengths, staleness, timeline, samples."),
    "audit": _Command(
        "audit:audit",
        "Check a run: nothing lost, nothing trained twice, no bound broken, no trajectory of mixed weights.",
    ),
    "scale": _Command("scale:scale", "Change the number of rollout instances."),
    "generate": _Command(
        "generate:generate", "Complete prompts in batches; writes JSONL with text, tokens and log-probs."
    ),
    "sft": _Command("sft:sft", "Teach a model prompts and completions, as a warm start for reinforcement learning."),
    "sim": _Command(
        "simulate:sim",
        "Simulate a cluster and compare modes; the decisions are those of the production orchestrator.",
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
    module, _, function = command.place.partition(":")
    one = typer.Typer(add_completion=False)
    kind = SettingsCommand if command.settings else None
    one.command(name, cls=kind)(getattr(importlib.import_module(f"dora_rl.apps.{module}"), function))
    return typer.main.get_command(one)


class _Group(TyperGroup):
    """All commands by name and one line each; the one that is given is loaded."""

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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
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
    """Entry point: a user's mistake is one sentence on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        _say(error)
        sys.exit(2)
    except (RunError, IntegrityError) as error:
        _say(error)
        sys.exit(1)


def _say(error: DoraError) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"dora-rl: {error}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
