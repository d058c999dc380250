"""`dora-rl compare`: runs beside each other, with the settings in which they differ and what came of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dora_rl.apps.output_file import check_writable
from dora_rl.apps.run_reader import is_run
from dora_rl.apps.summary import Summary, summarise
from dora_rl.apps.summary_table import accuracy, best, change, counts, duration, histogram
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir

_ABSENT = "-"
_BASE = "folder of the config"


class ComparedRun(NamedTuple):
    """One column of the comparison."""

    path: Path
    settings: dict[str, Any]
    """All settings by their dotted names, and the folder that their paths are relative to."""
    summary: Summary


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of runs.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the comparison to this file.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with curves.")] = None,
) -> None:
    """Compare runs: the settings in which they differ, and their speed, staleness, reward and accuracy."""
    if len(runs) < 2:
        raise UserError("a comparison needs two runs or more: dora-rl compare RUN RUN")
    for file in (json_file, page):
        if file is not None:
            check_writable(file)
    compared = [read(path) for path in runs]
    differing = differing_settings([run.settings for run in compared])
    console = Console()
    titles = _titles(compared)
    settings, results = _setting_rows(differing, compared), result_rows([run.summary for run in compared])
    console.print(_table("setting", titles, settings or [["none differs"]]), highlight=False)
    console.print(_table("result", titles, results), highlight=False)
    if json_file is not None:
        documents = [document(run, differing) for run in compared]
        json_file.write_text(json.dumps({"runs": documents}, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        from dora_rl.apps.compare_page import write_comparison

        runs_shown = [(title, run.path, run.summary) for title, run in zip(titles, compared, strict=True)]
        write_comparison(page, runs_shown, settings, results)


def read(path: Path) -> ComparedRun:
    """The settings and the summary of a run."""
    if not is_run(path):
        raise UserError(f"'{path}' is not the folder of a run: name folders that `dora-rl train` has made")
    folder = RunDir.open(path)
    try:
        settings = {_BASE: str(folder.base()), **dict(flatten(folder.settings()))}
        return ComparedRun(path, settings, summarise(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"'{path}' is damaged, or was written by another version of dora-rl: leave it out") from error


def flatten(settings: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings that are not the same in all runs, in the order of the config."""
    names = dict.fromkeys(name for settings in runs for name in settings)
    return [name for name in names if any(name not in one or one[name] != runs[0].get(name) for one in runs)]


def document(run: ComparedRun, differing: Sequence[str]) -> dict[str, Any]:
    """What is known of a run, for programs; a setting that the run does not have is left out."""
    summary = run.summary
    return {
        "name": summary.name,
        "path": str(run.path),
        "settings": {name: run.settings[name] for name in differing if name in run.settings},
        "state": summary.state,
        "steps": summary.steps,
        "steps_asked": summary.steps_asked,
        "tokens": summary.tokens,
        "tokens_per_second": summary.tokens_per_second,
        "seconds": summary.seconds,
        "step_seconds": summary.step_seconds,
        "accuracy": None if summary.accuracy is None else [_evaluated(one) for one in summary.accuracy],
        "best": None if summary.best is None else _evaluated(summary.best),
        "reward": summary.rewards,
        "staleness": {str(age): count for age, count in summary.staleness.items()},
        "mean_staleness": summary.mean_staleness,
        "latency_in_steps": summary.latency_in_steps,
        "occupancy": summary.occupancy,
        "failed": summary.failed,
        "restarts": summary.restarts,
        "policy": None if summary.policy is None else str(summary.policy),
    }


def result_rows(runs: Sequence[Summary]) -> list[list[str]]:
    """One row for each figure: its name, and its value in each run."""
    asked = ["" if run.steps_asked is None else f" of {run.steps_asked}" for run in runs]
    mean = ["none trained" if run.mean_staleness is None else f"{run.mean_staleness:.2f}" for run in runs]
    return [
        ["steps", *(f"{run.steps}{of}, {run.state}" for run, of in zip(runs, asked, strict=True))],
        ["tokens/s", *(f"{run.tokens_per_second:,.0f}" for run in runs)],
        ["time", *(duration(run.seconds) for run in runs)],
        ["step (median)", *(duration(run.step_seconds) for run in runs)],
        ["held-out accuracy", *(accuracy(run) for run in runs)],
        ["best version", *("not evaluated" if run.best is None else best(run.best) for run in runs)],
        ["reward", *(change(run.rewards) for run in runs)],
        ["mean staleness", *mean],
        ["staleness", *(histogram(run.staleness) for run in runs)],
        ["occupancy", *(f"{run.occupancy:.0%}" for run in runs)],
        ["failed trajectories", *(counts(run.failed) or "none" for run in runs)],
        ["processes restarted", *(counts(run.restarts) or "none" for run in runs)],
    ]


def _evaluated(result: tuple[int, float]) -> dict[str, Any]:
    return {"version": result[0], "accuracy": result[1]}


def _setting_rows(differing: Sequence[str], runs: Sequence[ComparedRun]) -> list[list[str]]:
    return [[name, *(_value(run.settings, name) for run in runs)] for name in differing]


def _value(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return _ABSENT
    value = settings[name]
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value)


def _titles(runs: Sequence[ComparedRun]) -> list[str]:
    """The names of the runs; their paths, if two have the same name."""
    names = [run.summary.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _table(kind: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(kind, style="dim", overflow="fold")
    for title in titles:
        table.add_column(escape(title), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
