"""Two runs of the benchmark against each other: which ratios of the new one lie outside the spread of the old one.

The spread of a ratio reaches from its lowest repeat to its highest, widened by the noise of a shared machine between
one hour and another. Two or three repeats alone would say too little: of two pairs from the same urn, every third have
nothing in common. A ratio lies outside if the median of its new repeats does.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NOISE = 0.15


def ratios(folder: Path) -> dict[str, list[float]]:
    """All ratios of a run, by name."""
    if not folder.is_dir():
        raise SystemExit(f"{folder} is not a folder of results: give one like benchmarks/results")
    found: dict[str, list[float]] = {}
    for path in sorted(folder.glob("*.json")):
        content: Any = json.loads(path.read_text())
        for ratio in content.get("ratios", []) if isinstance(content, dict) else []:
            if isinstance(ratio, dict):
                found[f"{path.stem}: {ratio['name']}"] = ratio["values"]
    return found


def outside(old: list[float], new: list[float]) -> bool:
    return not min(old) / (1 + NOISE) <= statistics.median(new) <= max(old) * (1 + NOISE)


def compare(old: Path, new: Path) -> int:
    """Print the ratios of both; how many lie outside."""
    before, after = ratios(old), ratios(new)
    table = Table(title=f"{old} and {new}")
    for column in ("ratio", "old", "new", ""):
        table.add_column(column, justify="left" if column in ("ratio", "") else "right")
    count = 0
    for name in sorted(before.keys() & after.keys()):
        off = outside(before[name], after[name])
        count += off
        table.add_row(name, _span(before[name]), _span(after[name]), "[red]outside" if off else "")
    console = Console()
    console.print(table)
    for name in sorted(before.keys() ^ after.keys()):
        console.print(f"only in {old if name in before else new}: {name}", highlight=False)
    console.print(f"{count} outside", highlight=False)
    return count


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"
