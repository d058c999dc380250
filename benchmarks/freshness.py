"""Simulated mean staleness and step time with eager and with just-in-time admission.

The floor of the mean staleness is latency divided by step time: the staleness of a group that never waits for the
trainer is the number of steps that pass while it is generated. The same orchestrator applies both rules
(`orchestrator.admission`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import RESULTS, Target, at_most, publish
from dora_rl.sim.presets import preset
from dora_rl.sim.run import Result, parse_variant, simulate

RULES = ("eager", "just_in_time")
NAME = "freshness"
console = Console(width=130)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A simulated case, and the aim for its mean staleness."""

    preset: str
    settings: tuple[str, ...] = ()
    staleness: float


_LONG = "steps=100"
CASES = {
    "laptop, about balanced": Case(preset="laptop", settings=(_LONG,), staleness=2.13),
    "laptop, trainer.utilisation = 0.29": Case(
        preset="laptop", settings=(_LONG, "trainer.utilisation=0.29"), staleness=1.13
    ),
    "laptop, trainer.utilisation = 0.07": Case(
        preset="laptop", settings=(_LONG, "trainer.utilisation=0.07"), staleness=0.51
    ),
    "24 instances, B = 64": Case(
        preset="laptop",
        settings=("steps=40", "devices=26", "trainer_devices=2", "control.groups_per_step=64"),
        staleness=0.66,
    ),
    "paper-64": Case(preset="paper-64", staleness=0.61),
    "paper-128": Case(preset="paper-128", staleness=1.0),
    "longcat-4096": Case(preset="longcat-4096", settings=("steps=4", "warmup_steps=5"), staleness=2.34),
}


def run(case: Case) -> dict[str, Any]:
    """The figures of a case, by admission rule."""
    found = {}
    for rule in RULES:
        config = preset(case.preset, [*case.settings, f"control.admission={rule}"])
        found[rule] = _figures(simulate(config, parse_variant("dora")))
    return found


def _figures(result: Result) -> dict[str, Any]:
    return {
        "over_lower_bound": round(result.over_lower_bound, 4),
        "tokens_per_second": round(result.tokens_per_second, 1),
        "mean_staleness": round(result.mean_staleness, 3),
        "least_staleness": round(result.least_staleness, 3),
        "occupancy": round(result.occupancy, 4),
        "staleness": {str(lag): round(share, 4) for lag, share in result.staleness.items()},
    }


def show(cases: dict[str, Any]) -> None:
    table = Table(caption="floor: latency over step time")
    for column in ("case", "admission", "step over bound", "mean staleness", "floor", "staleness"):
        table.add_column(column, justify="left" if column in ("case", "admission", "staleness") else "right")
    for name, rules in cases.items():
        for rule, one in rules.items():
            table.add_row(
                name,
                rule,
                f"{one['over_lower_bound']:.3f}",
                f"{one['mean_staleness']:.2f}",
                f"{one['least_staleness']:.2f}",
                "  ".join(f"{lag}:{share:.0%}" for lag, share in one["staleness"].items() if share >= 0.005),
            )
    console.print(table)


def targets(cases: dict[str, Any]) -> list[Target]:
    """Step times are compared with the bound of their own batches, since the two rules train different batches."""
    found = []
    for name, rules in cases.items():
        new, old = rules["just_in_time"], rules["eager"]
        ratio = new["over_lower_bound"] / old["over_lower_bound"]
        found.append(at_most(f"{name}: step over bound, just in time / eager", 1.01, ratio))
        found.append(at_most(f"{name}: mean staleness", CASES[name].staleness, new["mean_staleness"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=CASES, help="run these cases only; the file keeps its figures of the others"
    )
    only = parser.parse_args().only
    path = RESULTS / f"{NAME}.json"
    kept = json.loads(path.read_text())["cases"] if only and path.exists() else {}
    for name in only or CASES:
        console.print(f"  {name}", highlight=False)
        kept[name] = run(CASES[name])
    cases = {name: kept[name] for name in CASES if name in kept}
    show(cases)
    publish(NAME, targets(cases), {"cases": cases})


if __name__ == "__main__":
    main()
