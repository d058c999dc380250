"""Paragraphs and tables of the benchmark page in Markdown."""

from __future__ import annotations

import statistics
from typing import Any

Content = dict[str, Any]


def prose(text: str) -> str:
    """A paragraph on one line."""
    return " ".join(text.split())


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def span(values: list[float], form: str) -> str:
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def shares(shares: dict[str, float], least: float = 0.01) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= least)


def target_table(content: Content) -> str:
    rows = [
        [one["name"], one["target"], f"{one['value']:g}", "yes" if one["met"] else "**no**"]
        for one in content["targets"]
    ]
    return table(["figure", "aim", "value", "met"], rows)


def ratio_table(content: Content) -> str:
    rows = []
    for one in content["ratios"]:
        aim = one["aim"]
        met = "" if aim is None else "yes" if statistics.median(one["values"]) >= aim else "**no**"
        rows.append([one["name"], span(one["values"], "{:.2f}"), "" if aim is None else f"at least {aim:g}", met])
    return table(["ratio", "value", "aim", "met"], rows)
