"""Compares two runs of the benchmark: which ratios of the new run lie outside the spread of the old one.

The spread of a ratio reaches from its lowest repeat to its highest, widened by the noise of a shared machine between
one hour and another. Two or three repeats alone are too few: of two pairs drawn from the same distribution, every third
have no overlap. A part whose repeats differ only by the state of the machine measures that noise: pooled over its many
ratios, the estimate is far better than that of a single ratio. A ratio lies outside if the median of its new repeats
does.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NOISE = 0.15
"""The noise of a part that does not measure it, and the least noise of one that does."""
BY_ACCURACY = 0.5
"""The noise of a time to an accuracy. The standard deviation of a share of 256 answers is three points, a tenth of
what is learned; this allows two of them on either side. An asynchronous run learns a little differently each time."""
_DEVIATIONS = 2.5
"""With this many beyond both ends of the repeats, one ratio in a hundred lies outside by chance."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The repeats of a ratio, and the factor by which its spread is wider than they are."""

    values: list[float]
    noise: float

    def holds(self, new: list[float]) -> bool:
        wider = 1 + self.noise
        return min(self.values) / wider <= statistics.median(new) <= max(self.values) * wider


def noise(repeats: Sequence[list[float]]) -> float:
    """The noise of ratios whose repeats differ only by the machine, from the pooled deviation of their logarithms."""
    squares = freedom = 0.0
    for values in repeats:
        logs = [math.log(value) for value in values]
        squares += sum((one - statistics.fmean(logs)) ** 2 for one in logs)
        freedom += len(logs) - 1
    return max(NOISE, math.exp(_DEVIATIONS * math.sqrt(squares / freedom)) - 1) if freedom else NOISE


def spreads(folder: Path) -> dict[str, Spread]:
    """All ratios of a results folder, by name."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder of results: give a folder like benchmarks/results")
    found: dict[str, Spread] = {}
    for path in sorted(folder.glob("*.json")):
        content: Any = json.loads(path.read_text())
        for ratio in content.get("ratios", []) if isinstance(content, dict) else []:
            if isinstance(ratio, dict):
                wider = ratio.get("noise") or content.get("noise", NOISE)
                found[f"{path.stem}: {ratio['name']}"] = Spread(values=ratio["values"], noise=wider)
    return found


def compare(old: Path, new: Path) -> int:
    """Print the ratios of both runs; returns how many lie outside."""
    before, after = spreads(old), spreads(new)
    table = Table(title=f"{old} and {new}")
    for column in ("ratio", "old", "wider by", "new", ""):
        table.add_column(column, justify="left" if column in ("ratio", "") else "right")
    count = 0
    for name in sorted(before.keys() & after.keys()):
        spread, values = before[name], after[name].values
        off = not spread.holds(values)
        count += off
        wider = f"{spread.noise:.0%}"
        table.add_row(name, _span(spread.values), wider, _span(values), "[red]outside" if off else "")
    console = Console()
    console.print(table)
    for name in sorted(before.keys() ^ after.keys()):
        console.print(f"only in {old if name in before else new}: {name}", highlight=False)
    console.print(f"{count} outside", highlight=False)
    return count


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"
