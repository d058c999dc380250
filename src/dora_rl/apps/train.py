"""`dora-rl train`: a run from a config file, or on from where it was left."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dora_rl.apps.figures import rows
from dora_rl.apps.report import write_report
from dora_rl.apps.summary import summarise
from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.folder import RunFolder

INSTALL = "this command needs torch and transformers: pip install 'dora-rl[train]'"
INTERRUPTED = 130


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="TOML file; `dora-rl init` writes one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder; the time if not given.")] = None,
    runtime: Annotated[str | None, typer.Option(help="`local`, or `ray` for a cluster: see docs/cluster.md.")] = None,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster: `auto`, or HOST:PORT.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")] = False,
) -> None:
    """Train a model with RL. Any setting can be given as an option: --control.max_staleness 4."""
    if (config is None) == (resume is None):
        raise UserError("give a config file to begin a run, or --resume RUN to go on with one")
    need_torch()
    from dora_rl.runtime.cluster.start import need_ray
    from dora_rl.runtime.folder import RunFolder

    settings = assignments(context.args)
    settings += [f"runtime={runtime}"] if runtime is not None else []
    settings += [f'ray.address="{address}"'] if address is not None else []
    if resume is not None:
        folder = RunFolder.open(resume)
        need_engine(folder.read())
        go_on(folder, bound=change(folder, settings))
        return
    assert config is not None
    resolved = read_config(config, settings)
    if dry_run:
        print_config(resolved)
        return
    if resolved.runtime == "ray":
        need_ray()  # before there is a folder
    need_engine(resolved)
    go_on(RunFolder.create(resolved, config.resolve().parent, name))


def need_engine(config: RunConfig) -> None:
    """Refuse a run whose rollout engine is not installed, before it begins; a cluster's nodes have their own."""
    from dora_rl.engine.vllm.installed import require

    elsewhere = config.runtime == "ray" and config.ray.address
    if config.rollout.engine.kind == "vllm" and not elsewhere:
        require()


def change(folder: RunFolder, settings: list[str]) -> int | None:
    """Resume elsewhere or with more or fewer instances, which is written down, or another K, which is returned."""
    before = folder.read()
    tree = override(before.model_dump(mode="json"), settings)
    after = build(type(before), tree, "options")
    elsewhere = {"runtime": after.runtime, "ray": after.ray}
    rollout = before.rollout.model_copy(update={"instances": after.rollout.instances})
    control = before.control.model_copy(update={"max_staleness": after.control.max_staleness})
    if before.model_copy(update={**elsewhere, "rollout": rollout, "control": control}) != after:
        raise UserError(
            "a run is resumed with the settings that it began with; only 'rollout.instances', "
            "'control.max_staleness', 'runtime' and 'ray' can be others: leave out the rest"
        )
    written = before.model_copy(update={**elsewhere, "rollout": rollout})
    if written != before:
        folder.write(written)
    return after.control.max_staleness if any(one.startswith("control.max_staleness=") for one in settings) else None


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


def go_on(folder: RunFolder, console: Console | None = None, *, bound: int | None = None) -> None:
    """Carry a run to its end, or to an interrupt."""
    from dora_rl.apps.live import Watch
    from dora_rl.runtime.cluster.start import need_ray
    from dora_rl.runtime.run import Run

    console = console or Console()
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"run {folder.path}")
    if folder.read().runtime == "ray":
        need_ray()
        from dora_rl.apps.remote import go_on_ray

        _end(folder, console, finished=go_on_ray(folder, console, bound))
        return
    run = Run(folder, notice=say, bound=bound)

    def interrupt(*_: object) -> None:
        if run.world.stopping:
            console.show_cursor()  # the live view hides it
            os._exit(INTERRUPTED)  # the processes end with their supervisor
        run.world.stopping = True
        # By another thread: the interrupt may have come in the middle of a line, which would be printed twice.
        text = "stopping; everything finished is kept. Once more to stop at once."
        threading.Thread(target=say, args=(text,)).start()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Watch(run, console) as watch:
            run.go(watch)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _end(folder, console, finished=run.orchestrator.finished or not run.world.stopping)


def _end(folder: RunFolder, console: Console, *, finished: bool) -> None:
    if not finished:
        console.print(
            f"go on with: dora-rl train --resume {folder.path}", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(INTERRUPTED)
    conclude(folder, console)


def conclude(folder: RunFolder, console: Console) -> None:
    """What happened in the whole run, and where to find it."""
    summary = summarise(folder)
    write_report(folder, summary)
    table = Table(title=f"run {summary.name}", show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows(summary):
        table.add_row(*map(escape, row))
    console.print(table, highlight=False)
    for name, path in (("policy", summary.policy), ("report", folder.report)):
        if path is not None:
            console.print(f"{name}: {path}", highlight=False, markup=False, soft_wrap=True)
