"""`dora-rl runs`: lists the runs in a folder, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dora_rl.apps.run_reader import is_run
from dora_rl.apps.summary import RunProgress, progress
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir

_COLUMNS = ("run", "mode", "K", "steps", "reward", "accuracy", "tokens/s", "state")
_LEFT = ("run", "mode", "state")
_COLOURS = {"finished": "green", "stopped": "yellow", "running": "cyan"}


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder with runs: `out` in their config.")] = Path("runs"),
) -> None:
    """List runs: their progress, reward and accuracy, and whether they are running."""
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}': name the folder that holds your runs")
    found = find(folder)
    console = Console()
    if not found:
        console.print(f"no runs in {folder}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    for run in found:
        table.add_row(*_row(run))
    console.print(table, highlight=False)


def find(folder: Path) -> list[RunDir]:
    """The runs in a folder, newest first."""
    begun = {path.parent: path.stat().st_mtime_ns for path in folder.glob("*/config.json") if is_run(path.parent)}
    # For two with the same time, their names contain the time or a number.
    return [RunDir(path) for path in sorted(begun, key=lambda it: (begun[it], it.name), reverse=True)]


def _row(run: RunDir) -> list[str]:
    try:
        return _cells(progress(run))
    except (
        UserError,
        KeyError,
        TypeError,
    ):  # damaged, or written by another version of dora-rl; the other runs are still listed
        return [escape(run.path.name), "", "", "", "", "", "", "[red]unreadable[/]"]


def _cells(run: RunProgress) -> list[str]:
    asked = "" if run.steps_asked is None else f"/{run.steps_asked}"
    return [
        escape(run.name),
        run.mode,
        str(run.max_staleness) if run.auto_bound is None else f"auto: {run.auto_bound}",
        f"{run.steps}{asked}",
        "" if run.rewards is None else f"{run.rewards[1]:.3f}",
        "" if run.accuracy is None else f"{run.accuracy[1][1]:.1%}",
        f"{run.tokens_per_second:,.0f}",
        f"[{_COLOURS[run.state]}]{run.state}[/]",
    ]
