"""Bars, predictions against findings, and growth on logarithmic axes, as SVG pictures without a library."""

from __future__ import annotations

import math
from pathlib import Path

COLOURS = ("#4c566a", "#d08770", "#a3be8c", "#88c0d0", "#5e81ac", "#b48ead", "#bf616a", "#ebcb8b")
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 280, 70, 30


def bars(path: Path, title: str, groups: dict[str, dict[str, tuple[float, float, float]]]) -> None:
    """Groups of bars with their spread: (middle, lowest, highest) by name."""
    most = max((high for group in groups.values() for _, _, high in group.values()), default=1.0) or 1.0
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    wide = _WIDTH / max(1, len(groups))
    each = wide * 0.85 / max(1, len(names))
    parts = _frame(title) + _rows([most * tick / 4 for tick in range(5)], most)
    for number, (label, group) in enumerate(groups.items()):
        left = number * wide + wide * 0.075
        parts.append(_text(left + wide * 0.425, _HEIGHT + 16, label))
        for place, name in enumerate(names):
            if name not in group:
                continue
            middle, low, high = (_HEIGHT * (1 - value / most) for value in group[name])
            x = left + place * each
            parts.append(
                f'<rect x="{x:.1f}" y="{middle:.1f}" width="{each * 0.9:.1f}" height="{_HEIGHT - middle:.1f}" '
                f'fill="{COLOURS[place % len(COLOURS)]}"/>'
            )
            at = x + each * 0.45
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="black"/>')
    _save(path, parts + _legend(names))


def against(path: Path, title: str, series: dict[str, list[tuple[float, float]]], aim: float) -> None:
    """Points (found, predicted) around the line on which they are equal, with the aim as a band."""
    values = [value for points in series.values() for point in points for value in point] or [1.0]
    most = 1.1 * max(values)

    def place(x: float, y: float) -> str:
        return f"{x / most * _WIDTH:.1f},{_HEIGHT * (1 - min(1.0, y / most)):.1f}"

    parts = _frame(title) + _rows([most * tick / 4 for tick in range(5)], most)
    band = [place(0, 0), place(most / (1 + aim), most), place(most, most), place(most, most * (1 - aim))]
    parts.append(f'<polygon points="{" ".join(band)}" fill="#88c0d0" opacity="0.2"/>')
    parts.append(f'<polyline points="{place(0, 0)} {place(most, most)}" stroke="#999" fill="none"/>')
    parts.append(_text(_WIDTH / 2, _HEIGHT + 16, f"found, 0 to {most:,.0f}; upwards: predicted"))
    for number, points in enumerate(series.values()):
        for x, y in points:
            cx, _, cy = place(x, y).partition(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="4" fill="{COLOURS[number]}"/>')
    _save(path, parts + _legend(list(series)))


def growth(path: Path, title: str, series: dict[str, tuple[list[float], list[float]]]) -> None:
    """Costs relative to the first one, both axes logarithmic."""
    along = [x / xs[0] for xs, _ in series.values() for x in xs]
    costs = [y / ys[0] for _, ys in series.values() for y in ys]
    wide, high = math.log2(max(along)), max(1.0, math.log2(max(costs)))
    low = min(0.0, math.log2(min(costs)))

    def place(x: float, y: float) -> str:
        return f"{math.log2(x) / wide * _WIDTH:.1f},{_HEIGHT * (1 - (math.log2(y) - low) / (high - low)):.1f}"

    parts = _frame(title)
    for power in range(math.ceil(low), math.floor(high) + 1):
        y = float(place(1, 2.0**power).partition(",")[2])
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#eee"/>')
        parts.append(_text(-6, y + 4, f"{2.0**power:g}", "end"))
    for power in range(0, math.floor(wide) + 1, 2):
        parts.append(_text(power / wide * _WIDTH, _HEIGHT + 16, f"{2**power}"))
    for number, (xs, ys) in enumerate(series.values()):
        points = " ".join(place(x / xs[0], y / ys[0]) for x, y in zip(xs, ys, strict=True))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    _save(path, parts + _legend(list(series), columns=1))


def _frame(title: str) -> list[str]:
    return [
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="0" y="-10">{title}</text>',
    ]


def _rows(values: list[float], most: float) -> list[str]:
    """Lines across, with their values."""
    parts = []
    for value in values:
        y = _HEIGHT * (1 - value / most)
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        parts.append(_text(-6, y + 4, f"{value:,.0f}" if most >= 8 else f"{value:.2g}", "end"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _legend(names: list[str], columns: int = 4) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x, y = number % columns * 165, _HEIGHT + 40 + number // columns * 18
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(_text(x + 20, y, name, "start"))
    return parts


def _save(path: Path, parts: list[str]) -> None:
    rows = max([_HEIGHT, *(float(part.split('y="')[1].split('"')[0]) for part in parts if part.startswith("<text"))])
    width, height = _WIDTH + _LEFT + 30, rows + _TOP + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" '
    head += f'font-size="12"><rect width="{width}" height="{height:.0f}" fill="white"/>'
    body = [head, f'<g transform="translate({_LEFT},{_TOP})">', *parts, "</g>", "</svg>"]
    path.write_text("\n".join(body) + "\n")
