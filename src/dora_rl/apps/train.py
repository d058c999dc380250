"""`dora-rl train`: a run from a config file, or on from where it was left."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig

INSTALL = "this command needs torch and transformers: pip install 'dora-rl[train]'"
INTERRUPTED = 130


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="TOML file; `dora-rl init` writes one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder; the time if not given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train a model with RL. Any setting can be given as an option: --control.max_staleness 4."""
    if (config is None) == (resume is None):
        raise UserError("give a config file to begin a run, or --resume RUN to go on with one")
    need_torch()
    from dora_rl.runtime.folder import RunFolder

    settings = assignments(context.args)
    if resume is not None:
        folder = RunFolder.open(resume)
        if settings:
            raise UserError("a run is resumed with the settings that it began with; leave out the options")
        go_on(folder)
        return
    assert config is not None
    resolved = read_config(config, settings)
    if dry_run:
        print_config(resolved)
        return
    go_on(RunFolder.create(resolved, config.resolve().parent, name))


def need_torch() -> None:
    """A missing extra is a user's matter."""
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise UserError(INSTALL) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def assignments(arguments: list[str]) -> list[str]:
    """`--a.b c` and `--a.b=c` as `a.b=c`."""
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            raise UserError(f"'{argument}' is not an option: settings are given as --section.key value")
        key, equals, value = argument[2:].partition("=")
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                raise UserError(f"'--{key}' has no value: write --{key} VALUE")
        found.append(f"{key}={value}")
    return found


def read_config(path: Path, settings: list[str]) -> RunConfig:
    """The config of a file with dotted settings on top."""
    from dora_rl.runtime.config import RunConfig

    config = build(RunConfig, override(read_toml(path), settings), str(path))
    beside = path.resolve().parent / config.model.path
    if not beside.exists():
        return config  # a name on the hub, or a path that loading will complain of
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(beside)})})


def print_config(config: RunConfig) -> None:
    """As TOML that can be used as a config file again."""
    import tomli_w

    sys.stdout.write(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))


def go_on(folder: Any) -> None:
    """Carry a run to its end, or to an interrupt."""
    from dora_rl.runtime.run import Run

    console = Console()
    console.print(f"run {folder.path}", highlight=False)
    run = Run(folder, notice=lambda text: console.print(text, highlight=False, markup=False))

    def interrupt(*_: object) -> None:
        if run.world.stopping:
            os._exit(INTERRUPTED)  # the processes end with their supervisor
        run.world.stopping = True
        console.print("stopping; everything finished is kept. Once more to stop at once.", highlight=False)

    before = signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run.go()
    finally:
        signal.signal(signal.SIGINT, before)
    if run.world.stopping and not run.orchestrator.finished:
        console.print(f"go on with: dora-rl train --resume {folder.path}", highlight=False)
        sys.exit(INTERRUPTED)
