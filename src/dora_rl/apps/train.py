"""`dora-rl train`: starts a run from a config file, or resumes one.

The run directory is created only after all checks that do not need it, and removed again if the engine or the trainer
refuses the model. Torch is imported late: the fork server imports it at the same time as this process.
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
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dora_rl.apps.config_options import META
from dora_rl.apps.log_level import LogLevel, log_to_stderr
from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.preflight import Prepared
    from dora_rl.runtime.run_dir import RunDir
    from dora_rl.runtime.supervisor.metrics import RunObserver
    from dora_rl.runtime.supervisor.run import Run

INTERRUPTED = 130
# Options that `quickstart` has too.
RunName = Annotated[str | None, typer.Option(help="Name of the run's folder; default: the current time.")]
RuntimeName = Annotated[str | None, typer.Option(help="`local`, or `ray` for a cluster: see docs/cluster.md.")]
RayAddress = Annotated[str | None, typer.Option(help="Address of the Ray cluster: `auto` or HOST:PORT.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the config and exit.")]
NoTrial = Annotated[
    bool, typer.Option("--no-trial", help="Skip the trial call of the reward or environment on the first problem.")
]
Page = Annotated[
    bool, typer.Option("--page", help="Serve a live page about the run while it lasts, and print its address.")
]
STOPPING = "stopping; all finished work is kept. Interrupt again to stop at once."


class Ready(NamedTuple):
    """What the checks before a run have made; a resumed run has none of it."""

    prepared: Prepared | None = None
    fork_server: ForkServer | None = None


_NOTHING = Ready()


def train(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="TOML file; `dora-rl init` writes one.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to resume.")] = None,
    name: RunName = None,
    runtime: RuntimeName = None,
    address: RayAddress = None,
    dry_run: DryRun = False,
    no_trial: NoTrial = False,
    page: Page = False,
    log_level: LogLevel = None,
) -> None:
    """Train a model with reinforcement learning. Any setting below can be an option: --control.max_staleness 4."""
    if (config is None) == (resume is None):
        raise UserError("give a config file to start a run, or --resume RUN to continue one")
    log_to_stderr(log_level)
    if page:
        need_page()
    from dora_rl.runtime.packages import need_packages
    from dora_rl.runtime.resume import change
    from dora_rl.runtime.run_dir import RunDir

    settings = given_settings(context, runtime, address, log_level)
    if resume is not None:
        folder = RunDir.open(resume)
        need_engine(folder.read())
        need_packages()
        run_to_end(folder, bound=change(folder, settings), page=page)
        return
    assert config is not None
    resolved = read_config(config, settings)
    start_run(resolved, config.resolve().parent, name, dry_run=dry_run, trial=not no_trial, page=page)


def given_settings(
    context: typer.Context, runtime: str | None, address: str | None, log_level: str | None
) -> list[str]:
    """The settings on the command line, with those that have an option of their own."""
    settings: list[str] = [*context.meta[META]]
    settings += [f"runtime={runtime}"] if runtime is not None else []
    settings += [f'ray.address="{address}"'] if address is not None else []
    # While the run is shown on the terminal, its messages go to the files in `logs` only.
    return [*settings, *([f"logging.level={log_level}"] if log_level is not None else [])]


def need_page() -> None:
    """Refuse `--page` without the packages that it needs, before anything is started."""
    from dora_rl.apps.serve.command import need_serve

    need_serve()


def start_run(
    config: RunConfig, base: Path, name: str | None, *, dry_run: bool, trial: bool, page: bool = False
) -> None:
    """Check everything; then print the config, or create the run directory and run to the end."""
    from dora_rl.runtime.run_dir import RunDir

    RunDir.check_name(name)
    with checked(config, base, trial=trial, notify=_notify, start=not dry_run) as ready:
        if dry_run:
            print_config(config)
            return
        folder = RunDir.create(config, base, name)
        with discarding(folder):
            run_to_end(folder, ready=ready, page=page)


@contextlib.contextmanager
def checked(
    config: RunConfig, base: Path, *, trial: bool, notify: Callable[[str], None], start: bool = True
) -> Iterator[Ready]:
    """Check everything that needs no run directory. With `start`, a fork server imports torch while this process does;
    it ends with the block."""
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.launch.ray.init import need_ray
    from dora_rl.runtime.preflight import check

    if config.runtime == "ray":
        need_ray()
    need_engine(config)
    with contextlib.ExitStack() as undo:
        early: list[ForkServer] = []

        def start_fork_server() -> None:
            if config.runtime == "local" and start:
                early.append(ForkServer(None))
                undo.callback(early[0].close)

        prepared = check(config, base, trial=trial, notify=notify, meanwhile=start_fork_server)
        yield Ready(prepared, early[0] if early else None)


@contextlib.contextmanager
def discarding(folder: RunDir) -> Iterator[None]:
    """Remove the run if its engine or trainer refuses it before its first group starts."""
    try:
        yield
    except UserError:
        _discard_unstarted(folder)
        raise


def _discard_unstarted(folder: RunDir) -> None:
    from dora_rl.core.commands import StartGroup
    from dora_rl.ledger.ledger import connect, read_events

    with contextlib.closing(connect(folder.ledger)) as connection:
        if any(isinstance(one, StartGroup) for logged in read_events(connection) for one in logged.commands):
            return
    folder.store(folder.read()).clear()
    shutil.rmtree(folder.path, ignore_errors=True)


def need_engine(config: RunConfig) -> None:
    """Refuse a run whose rollout engine is not installed; the nodes of a cluster have their own installation."""
    from dora_rl.engine.registry import engine_factory

    elsewhere = config.runtime == "ray" and config.ray.address
    if not elsewhere:
        engine_factory(config.rollout.engine.kind).require_installed()


def read_config(path: Path, settings: list[str]) -> RunConfig:
    """The config in a file, overridden by dotted settings."""
    from dora_rl.runtime.config import RunConfig

    config = build(RunConfig, override(read_toml(path), settings), str(path))
    beside = path.resolve().parent / config.model.path
    if not beside.exists():
        return config  # a name on the hub, or a path that can't be loaded
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(beside)})})


def print_config(config: RunConfig) -> None:
    """Print the config as TOML, which is again a valid config file."""
    import tomli_w

    sys.stdout.write(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))


def _notify(text: str) -> None:
    """Print to standard error, since a dry run prints a config file to standard output."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)


def run_to_end(
    folder: RunDir,
    console: Console | None = None,
    *,
    bound: int | None = None,
    ready: Ready = _NOTHING,
    page: bool = False,
) -> None:
    """Run until the end or an interrupt, and print the result; a new run passes what its checks have made."""
    console = console or Console()

    def abort() -> None:
        console.show_cursor()  # the panel hides it
        os._exit(INTERRUPTED)  # the workers end with their supervisor

    with _page(folder, console) if page else contextlib.nullcontext():
        finished = drive_run(folder, console, bound=bound, ready=ready, abort=abort)
    _end(folder, console, finished=finished)


@contextlib.contextmanager
def _page(folder: RunDir, console: Console) -> Iterator[None]:
    """Serve the live page of the run until the block ends."""
    from dora_rl.apps.serve.command import page_beside

    with page_beside(folder.path) as address:
        console.print(f"page {address}", highlight=False, markup=False, soft_wrap=True)
        yield


def drive_run(
    folder: RunDir,
    console: Console,
    *,
    bound: int | None = None,
    ready: Ready = _NOTHING,
    abort: Callable[[], None],
    observe: Callable[[Run], RunObserver] | None = None,
) -> bool:
    """Run until the end; False if it was stopped before. The first interrupt stops it, the second calls `abort`."""
    from dora_rl.runtime.launch.ray.init import need_ray

    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"run {folder.path}")
    if folder.read().runtime == "ray":
        need_ray()
        from dora_rl.apps.ray_run import run_on_ray

        return run_on_ray(folder, console, bound)
    run = _make_run(folder, say, bound, ready)
    if observe is not None:
        run.metrics.observers.append(observe(run))
    from dora_rl.apps.progress_panel import ProgressPanel

    def interrupt(*_: object) -> None:
        if run.supervisor.stopping:
            abort()
            return
        run.supervisor.stopping = True
        # In another thread: the interrupt may have come in the middle of a line, which would be printed twice.
        text = STOPPING
        threading.Thread(target=say, args=(text,)).start()

    with _handling(interrupt), ProgressPanel(run, console) as watch:
        run.run(watch)
    return run.orchestrator.finished or not run.supervisor.stopping


@contextlib.contextmanager
def _handling(interrupt: Callable[..., None]) -> Iterator[None]:
    """Handle interrupts; in a thread there are none, since Python delivers signals to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _make_run(folder: RunDir, say: Callable[[str], None], bound: int | None, ready: Ready) -> Run:
    """The run, ready to start."""
    from dora_rl.runtime.launch.fork_server import ForkServer
    from dora_rl.runtime.launch.machine import Machine

    # It imports torch while this process does.
    fork_server = ready.fork_server or ForkServer(folder.logs / "fork_server.log")
    try:
        from dora_rl.runtime.supervisor.run import Run

        machine = Machine(fork_server=fork_server.with_log)
        return Run(folder, notify=say, bound=bound, machine=machine, prepared=ready.prepared)
    except BaseException:
        fork_server.close()
        raise


def _end(folder: RunDir, console: Console, *, finished: bool) -> None:
    if not finished:
        console.print(
            f"resume with: dora-rl train --resume {folder.path}", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(INTERRUPTED)
    conclude(folder, console)


def conclude(folder: RunDir, console: Console) -> None:
    """Print the summary of the run, and where its policy and report are."""
    from dora_rl.apps.report import write_report
    from dora_rl.apps.run_reader import best_policy
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
    for name, path in (("policy", summary.policy), ("best", best_policy(folder)), ("report", folder.report)):
        if path is not None:
            console.print(f"{name}: {path}", highlight=False, markup=False, soft_wrap=True)
