"""`dora-rl sim` and `dora-rl plan`: simulate a cluster, and search for its best configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dora_rl.apps.output_file import check_writable
from dora_rl.apps.timeline import write_timeline
from dora_rl.core.config import build, override, read_toml
from dora_rl.core.errors import ConfigError
from dora_rl.orchestrator.modes import MODES
from dora_rl.sim.config import SimConfig
from dora_rl.sim.plan import PlanResult, plan
from dora_rl.sim.presets import PRESETS, preset_settings
from dora_rl.sim.run import Result, control_for, parse_variant, simulate

DEFAULT_MODES = ",".join(MODES)
console = Console()

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as control.max_staleness=4. Repeatable."),
]


def sim(
    preset_name: Annotated[
        str, typer.Argument(metavar="PRESET", help=f"One of {', '.join(PRESETS)}, or a TOML file of settings.")
    ],
    modes: Annotated[
        str,
        typer.Option(help="Modes to compare, with variants such as dora:proportional, dora:elastic or dora:k1."),
    ] = DEFAULT_MODES,
    settings: Set = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a timeline to this file.")] = None,
) -> None:
    """Simulate a cluster and compare modes, with the orchestrator that real runs use."""
    config = load(preset_name, settings or [])
    variants = [parse_variant(text.strip()) for text in modes.split(",") if text.strip()]
    if not variants:
        raise ConfigError("'--modes' is empty: name at least one mode")
    for file in (json_file, html_file):
        if file is not None:
            check_writable(file)
    results: dict[str, Result] = {}
    with _progress() as bar:
        for variant in variants:
            task = bar.add_task(variant.name, total=config.warmup_steps + config.steps)
            results[variant.name] = simulate(
                config,
                variant,
                progress=lambda step, task=task: bar.update(task, completed=step),  # type: ignore[misc]
                timeline=html_file is not None,
            )
    print_results(console, preset_name, config, results)
    if json_file is not None:
        json_file.write_text(json.dumps(figures(preset_name, config, results), indent=2) + "\n", encoding="utf-8")
        console.print(f"figures: {json_file}", highlight=False, soft_wrap=True)
    if html_file is not None:
        write_timeline(html_file, preset_name, figures(preset_name, config, results), results)
        console.print(f"timeline: {html_file}", highlight=False, soft_wrap=True)


def load(name: str, settings: list[str]) -> SimConfig:
    """A preset by name, or a TOML file by its path, with dotted assignments applied."""
    return build(SimConfig, override(settings_of(name), settings), source=name)


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a preset, or those in a TOML file, as a tree."""
    if name in PRESETS or not name.endswith(".toml"):
        return preset_settings(name)
    return read_toml(Path(name))


def print_results(to: Console, name: str, config: SimConfig, results: dict[str, Result]) -> None:
    """Print the tables that compare modes."""
    to.print(_table(name, config, results))
    to.print(_versions(results))
    to.print(_causes(results))
    for mode, result in results.items():
        if control_for(config, result.variant).adaptive:
            to.print(_bounds(mode, result), highlight=False, soft_wrap=True)


def figures(name: str, config: SimConfig, results: dict[str, Result]) -> dict[str, Any]:
    """The values that `--json` writes."""
    sync = results.get("sync")
    return {
        "preset": name,
        "devices": config.devices,
        "steps": config.steps,
        "seed": config.seed,
        "modes": {
            mode: {
                "step_seconds": result.step_seconds,
                "tokens_per_second": result.tokens_per_second,
                "occupancy": result.occupancy,
                "speedup_over_sync": _speedup(result, sync),
                "over_lower_bound": result.over_lower_bound,
                "lower_bound_seconds": result.lower_bound.seconds,
                "staleness": {str(lag): share for lag, share in result.staleness.items()},
                "mean_staleness": result.mean_staleness,
                "latency_in_steps": result.latency_in_steps,
                "bounds": [list(one) for one in result.bounds],
                "live_versions": result.live_versions,
                "migrations": result.migrations,
                "idle": result.idle,
                "labels": result.labels,
                "trainer": result.trainer,
                "events": result.events,
            }
            for mode, result in results.items()
        },
    }


def _speedup(result: Result, sync: Result | None) -> float | None:
    return None if sync is None else result.tokens_per_second / sync.tokens_per_second


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.2f} min"


def _table(name: str, config: SimConfig, results: dict[str, Result]) -> Table:
    control = config.control
    title = f"{name}: {config.devices} devices, {control.groups_per_step} groups of {control.group_size} per step"
    table = Table(
        title=title,
        caption="x sync: trained tokens/s relative to sync; x bound: step time relative to the lower bound",
    )
    for column in ("mode", "step", "tokens/s", "x sync", "x bound", "occupancy"):
        table.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    sync = results.get("sync")
    for mode, result in results.items():
        speedup = _speedup(result, sync)
        table.add_row(
            mode,
            _duration(result.step_seconds),
            f"{result.tokens_per_second:,.0f}",
            "" if speedup is None else f"{speedup:.2f}",
            f"{result.over_lower_bound:.2f}",
            f"{result.occupancy:.0%}",
        )
    return table


def _versions(results: dict[str, Result]) -> Table:
    """A second table, so that both fit into 80 columns; long histograms wrap."""
    table = Table(
        title="Versions",
        caption="staleness: mean, latency of groups in steps, and the share of groups with each staleness",
    )
    table.add_column("mode", no_wrap=True)
    table.add_column("live", justify="right", no_wrap=True)
    table.add_column("moved/step", justify="right", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    table.add_column("staleness")
    for mode, result in results.items():
        table.add_row(
            mode,
            f"{result.live_versions:.1f}",
            f"{result.migrations:,.0f}",
            f"{result.mean_staleness:.2f}",
            f"{result.latency_in_steps:.2f}",
            "  ".join(f"{lag}:{share:.0%}" for lag, share in result.staleness.items() if share >= 0.005),
        )
    return table


def _bounds(mode: str, result: Result) -> str:
    """How an adaptive bound developed."""
    later = ", ".join(f"{bound} after step {version - 1}" for version, bound in result.bounds[1:])
    return f"{mode}: the staleness bound was {result.bounds[0][1]} at first{f', then {later}' if later else ''}"


def _causes(results: dict[str, Result]) -> Table:
    table = Table(title="Time of slots and trainer, and causes of idle time")
    table.add_column("mode", no_wrap=True)
    table.add_column("slots")
    table.add_column("idle slots")
    table.add_column("trainer")
    for mode, result in results.items():
        busy = {label: share for label, share in result.labels.items() if label != "idle"}
        table.add_row(mode, _shares(busy), _shares(result.idle) or "none", _shares(result.trainer))
    return table


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.001)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def plan_command(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER.toml", help="Hardware, model and batch: see docs/simulator.md.")
    ],
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="Measured lengths, one line per trajectory.")],
    settings: Set = None,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of candidates to simulate.")] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the ranking to this file.")] = None,
) -> None:
    """Find the best K, instance size, slots and split between training and rollout for a cluster and a trace."""
    tree = override(read_toml(cluster), settings or [])
    tree.setdefault("workload", {})["trace"] = str(trace)
    config = build(SimConfig, tree, source=str(cluster))
    if json_file is not None:
        check_writable(json_file)
    with _progress() as bar:
        task = bar.add_task("candidates", total=most)
        ranking, skipped = plan(
            config, most=most, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    console.print(_ranking(ranking, skipped))
    best = ranking[0]
    console.print(
        f"Best: max_staleness = {best.candidate.staleness}, {best.candidate.trainer_devices} devices for training, "
        f"{best.candidate.instances} instances of {best.candidate.config.rollout.devices} with "
        f"{_slots(best.candidate.slots)} for rollout; "
        f"the bottleneck is {best.binds}.",
        highlight=False,
    )
    if json_file is not None:
        json_file.write_text(json.dumps([_planned(it) for it in ranking], indent=2) + "\n", encoding="utf-8")


def _slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots each"


def _ranking(ranking: list[PlanResult], skipped: int) -> Table:
    table = Table(
        title="Plans, best first",
        caption="train: devices; rollout: instances x devices, slots of each; lag: mean staleness\n"
        "latency: of groups, in steps\n"
        f"{skipped} further candidates can't win or exceed --most, and were not simulated",
    )
    for column in ("K", "train", "rollout", "step", "tokens/s", "lag", "latency", "x bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bottleneck", overflow="fold")
    for planned in ranking:
        candidate, result = planned.candidate, planned.result
        table.add_row(
            str(candidate.staleness),
            str(candidate.trainer_devices),
            f"{candidate.instances} x {candidate.config.rollout.devices}, {candidate.slots}",
            _duration(result.step_seconds),
            f"{result.tokens_per_second:,.0f}",
            f"{planned.mean_staleness:.2f}",
            f"{result.latency_in_steps:.2f}",
            f"{result.over_lower_bound:.2f}",
            planned.binds,
        )
    return table


def _planned(planned: PlanResult) -> dict[str, Any]:
    candidate, result = planned.candidate, planned.result
    return {
        "max_staleness": candidate.staleness,
        "trainer_devices": candidate.trainer_devices,
        "instances": candidate.instances,
        "devices_per_instance": candidate.config.rollout.devices,
        "slots_per_instance": candidate.slots,
        "step_seconds": result.step_seconds,
        "tokens_per_second": result.tokens_per_second,
        "mean_staleness": planned.mean_staleness,
        "latency_in_steps": result.latency_in_steps,
        "over_lower_bound": result.over_lower_bound,
        "binds": planned.binds,
    }
