"""`dora-rl train`: a run from a config file, or on from where it was left.

A run folder is created only when everything that can be checked without one is right, and goes again if the engine or
the trainer refuses the model. Torch is imported late: the process that forks the others imports it beside this one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dora_rl.apps.config_options import META
from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.preflight import Prepared
    from dora_rl.runtime.run_dir import RunDir
    from dora_rl.runtime.supervisor.run import Run

INTERRUPTED = 130


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="TOML file; `dora-rl init` writes one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder; the time if not given.")] = None,
    runtime: Annotated[str | None, typer.Option(help="`local`, or `ray` for a cluster: see docs/cluster.md.")] = None,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster: `auto`, or HOST:PORT.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the config and stop.")] = False,
    no_trial: Annotated[
        bool, typer.Option("--no-trial", help="Do not try the reward or environment on the first problem.")
    ] = False,
) -> None:
    """Train a model with reinforcement learning. Any setting below can be an option: --control.max_staleness 4."""
    if (config is None) == (resume is None):
        raise UserError("give a config file to begin a run, or --resume RUN to go on with one")
    from dora_rl.runtime.packages import need_packages
    from dora_rl.runtime.resume import change
    from dora_rl.runtime.run_dir import RunDir

    settings: list[str] = [*context.meta[META]]
    settings += [f"runtime={runtime}"] if runtime is not None else []
    settings += [f'ray.address="{address}"'] if address is not None else []
    if resume is not None:
        folder = RunDir.open(resume)
        need_engine(folder.read())
        need_packages()
        go_on(folder, bound=change(folder, settings))
        return
    assert config is not None
    resolved = read_config(config, settings)
    begin(resolved, config.resolve().parent, name, dry_run=dry_run, trial=not no_trial)


def begin(config: RunConfig, base: Path, name: str | None, *, dry_run: bool, trial: bool) -> None:
    """Check everything; then print the config, or make the folder and carry the run to its end."""
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.launch.ray.init import need_ray
    from dora_rl.runtime.preflight import check
    from dora_rl.runtime.run_dir import RunDir

    if config.runtime == "ray":
        need_ray()
    need_engine(config)
    RunDir.check_name(name)
    with contextlib.ExitStack() as undo:
        early: list[ForkServer] = []

        def start() -> None:
            """Let the nursery import torch while this process does."""
            if config.runtime == "local" and not dry_run:
                early.append(ForkServer(None))
                undo.callback(early[0].close)

        prepared = check(config, base, trial=trial, notify=_remark, meanwhile=start)
        if dry_run:
            print_config(config)
            return
        folder = RunDir.create(config, base, name)
        try:
            go_on(folder, nursery=early[0] if early else None, prepared=prepared)
        except UserError:
            _discard_unbegun(folder)
            raise


def _discard_unbegun(folder: RunDir) -> None:
    """A run that was refused by its engine or trainer before its first group leaves nothing behind."""
    from dora_rl.core.commands import StartGroup
    from dora_rl.ledger.ledger import connect, read_events

    with contextlib.closing(connect(folder.ledger)) as connection:
        if any(isinstance(one, StartGroup) for logged in read_events(connection) for one in logged.commands):
            return
    folder.store(folder.read()).clear()
    shutil.rmtree(folder.path, ignore_errors=True)


def need_engine(config: RunConfig) -> None:
    """Refuse a run whose rollout engine is not installed, before it begins; a cluster's nodes have their own."""
    from dora_rl.engine.registry import engine_factory

    elsewhere = config.runtime == "ray" and config.ray.address
    if not elsewhere:
        engine_factory(config.rollout.engine.kind).require_installed()


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


def _remark(text: str) -> None:
    """On standard error, since a dry run prints a config file."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


def go_on(
    folder: RunDir,
    console: Console | None = None,
    *,
    bound: int | None = None,
    nursery: ForkServer | None = None,
    prepared: Prepared | None = None,
) -> None:
    """Carry a run to its end, or to an interrupt; `nursery` and `prepared` are those of a run that begins."""
    from dora_rl.runtime.launch.ray.init import need_ray

    console = console or Console()
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"run {folder.path}")
    if folder.read().runtime == "ray":
        need_ray()
        from dora_rl.apps.ray_run import go_on_ray

        _end(folder, console, finished=go_on_ray(folder, console, bound))
        return
    run = _wire(folder, say, bound, nursery, prepared)
    from dora_rl.apps.progress_panel import ProgressPanel

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
        with ProgressPanel(run, console) as watch:
            run.go(watch)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _end(folder, console, finished=run.orchestrator.finished or not run.world.stopping)


def _wire(
    folder: RunDir, say: Callable[[str], None], bound: int | None, nursery: ForkServer | None, prepared: Prepared | None
) -> Run:
    """The run, ready to go on."""
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.launch.machine import Machine

    # It imports torch while this process does.
    nursery = nursery or ForkServer(folder.logs / "fork_server.log")
    try:
        from dora_rl.runtime.supervisor.run import Run

        return Run(folder, notice=say, bound=bound, machine=Machine(fork_server=nursery.with_log), prepared=prepared)
    except BaseException:
        nursery.close()
        raise


def _end(folder: RunDir, console: Console, *, finished: bool) -> None:
    if not finished:
        console.print(
            f"go on with: dora-rl train --resume {folder.path}", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(INTERRUPTED)
    conclude(folder, console)


def conclude(folder: RunDir, console: Console) -> None:
    """What happened in the whole run, and where to find it."""
    from dora_rl.apps.report import write_report
    from dora_rl.apps.summary import summarise
    from dora_rl.apps.summary_table import rows

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
