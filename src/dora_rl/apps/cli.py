"""The command `dora-rl`."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from dora_rl.apps.audit import audit
from dora_rl.apps.evaluate import evaluate
from dora_rl.apps.generate import generate
from dora_rl.apps.init import init
from dora_rl.apps.report import report
from dora_rl.apps.runs import runs
from dora_rl.apps.scale import scale
from dora_rl.apps.sft import sft
from dora_rl.apps.simulate import plan_command, sim
from dora_rl.apps.train import train
from dora_rl.core.errors import DoraError, IntegrityError, RunError, UserError

app = typer.Typer(
    name="dora-rl",
    help="Multi-version asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Multi-version asynchronous reinforcement learning for language models."""


@app.command()
def version() -> None:
    """Print the version."""
    from dora_rl import __version__

    Console().print(__version__, highlight=False)


app.command("sim")(sim)
app.command("plan")(plan_command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.command()(audit)
app.command()(scale)
app.command()(sft)
app.command()(generate)
app.command()(report)
app.command()(runs)
app.command("eval")(evaluate)
app.command()(init)


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
    Console(stderr=True, soft_wrap=True).print(f"dora-rl: {error}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
