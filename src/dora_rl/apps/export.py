"""`dora-rl export`: a run in the format of another tool. It reads the files of the run, which may be running."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dora_rl.apps.output_file import check_writable
from dora_rl.core.errors import UserError
from dora_rl.core.types import SECOND
from dora_rl.runtime.run_dir import RunDir


class Format(StrEnum):
    """What a run can be exported to."""

    TRACE = "trace"
    CSV = "csv"


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or not.")],
    target: Annotated[
        Path, typer.Argument(help="File of the trace, compressed if its name ends in .gz; folder of the CSV files.")
    ],
    to: Annotated[
        Format,
        typer.Option(help="`trace`: a timeline for ui.perfetto.dev; `csv`: metrics, groups and trajectories."),
    ],
    window: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Trace only from second A to second B of the run; also `A:`, `:B`."),
    ] = None,
) -> None:
    """Export a run: a Perfetto trace of its timeline, or its metrics, groups and trajectories as CSV files."""
    folder = RunDir.open(run)
    start, end = parse_window(window)
    match to:
        case Format.TRACE:
            _export_trace(folder, target, start, end)
        case Format.CSV:
            if window is not None:
                raise UserError("--window is for traces: leave it out, the tables have the times of all rows")
            _export_tables(folder, target)


def _export_trace(folder: RunDir, file: Path, start: float | None, end: float | None) -> None:
    from dora_rl.apps.exports.trace import write_trace

    check_writable(file)
    written = write_trace(folder, file, start, end)
    first, last = (time / SECOND for time in written.window)
    _say(f"trace: {file} ({written.slices:,} slices, second {first:.1f} to {last:.1f}); open it in ui.perfetto.dev")


def _export_tables(folder: RunDir, out: Path) -> None:
    from dora_rl.apps.exports.csv_tables import write_tables

    for name, rows in write_tables(folder, out).items():
        _say(f"{out / name}: {rows:,} rows")


def parse_window(text: str | None) -> tuple[float | None, float | None]:
    """The start and the end of a window in seconds; None where it is not limited."""
    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        start, end = (float(one) if one else None for one in (first, last))
    except ValueError:
        colon = ""
        start = end = None
    numbers = [one for one in (start, end) if one is not None]
    if not colon or not all(math.isfinite(one) and one >= 0 for one in numbers):
        raise UserError(f"--window takes two times in seconds, such as 60:120 or 60: or :120, not '{text}'")
    if start is not None and end is not None and start >= end:
        raise UserError(f"--window must end after it starts, not '{text}'")
    return start, end


def _say(text: str) -> None:
    Console(soft_wrap=True).print(text, highlight=False, markup=False)
