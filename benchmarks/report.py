"""Targets and ratios of all benchmarks: a table on the terminal, and a JSON file under `results/`."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An aim and the measured value."""

    name: str
    target: str
    value: float
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure divided by another, for each interleaved repeat."""

    name: str
    values: list[float]
    aim: float | None = None
    """The lowest median that meets the aim."""
    noise: float | None = None
    """Factor by which the spread of a second run is wider than these values; None for the default of its part."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def target(self) -> Target:
        assert self.aim is not None
        return at_least(self.name, self.aim, self.median)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


def aims(ratios: list[Ratio]) -> list[Target]:
    """The targets of those ratios that have an aim."""
    return [ratio.target() for ratio in ratios if ratio.aim is not None]


def at_most(name: str, limit: float, value: float) -> Target:
    """A target with an upper limit, compared at the four printed digits, so that a printed tie is a tie."""
    value = round(value, 4)
    return Target(name=name, target=f"<= {limit:g}", value=value, met=value <= limit)


def at_least(name: str, limit: float, value: float) -> Target:
    """A target with a lower limit, compared at the four printed digits."""
    value = round(value, 4)
    return Target(name=name, target=f">= {limit:g}", value=value, met=value >= limit)


def shown(path: str | Path) -> str:
    """A path as results may show it: of a path outside the project, only the last component."""
    path = Path(path).absolute()
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name


def publish(name: str, targets: list[Target], figures: dict[str, Any], *, quiet: bool = False) -> None:
    """Write the targets and the raw figures, and print the targets as a table unless `quiet`."""
    _write(name, targets, figures)
    if quiet:
        return
    table = Table(title=f"{name}: targets")
    for column in ("target", "aim", "value", "met"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for target in targets:
        table.add_row(target.name, target.target, f"{target.value:g}", "yes" if target.met else "[red]NO")
    Console().print(table)
    Console().print(f"written: benchmarks/results/{name}.json")


def _write(name: str, targets: list[Target], figures: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "python": platform.python_version(),
        "targets": [asdict(target) for target in targets],
        **figures,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
