"""Curves with bands as an SVG picture: two panels, no library."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_COLOURS = ("#4c566a", "#d08770", "#a3be8c", "#88c0d0", "#5e81ac", "#b48ead")
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 300, 50, 30


class Band(NamedTuple):
    """A curve and half the width of its band at each point."""

    x: list[float]
    y: list[float]
    half: list[float]


_TITLE = "held-out accuracy, mean and 95% band over seeds"


def draw(path: Path, curves: dict[str, tuple[Band, Band]], said: str = _TITLE) -> None:
    """Accuracy against steps on the left, against seconds on the right."""
    width, height = 2 * (_WIDTH + 70), _HEIGHT + 110
    style = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for panel, title in enumerate(("steps", "seconds")):
        parts.append(f'<g transform="translate({panel * (_WIDTH + 70) + _LEFT},{_TOP})">')
        parts += _panel({mode: both[panel] for mode, both in curves.items()}, title, said)
        parts.append("</g>")
    for number, mode in enumerate(curves):
        x = _LEFT + number % 3 * 160
        y = _TOP + _HEIGHT + 45 + number // 3 * 18
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{_COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 20}" y="{y}">{mode}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(curves: dict[str, Band], title: str, said: str) -> list[str]:
    most = max(max(band.x) for band in curves.values()) or 1.0
    low = min(min(y - h for y, h in zip(band.y, band.half, strict=True)) for band in curves.values())
    low = max(0.0, int(low * 10) / 10)

    def place(x: float, y: float) -> str:
        return f"{x / most * _WIDTH:.1f},{(1 - (y - low) / (1 - low)) * _HEIGHT:.1f}"

    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>']
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 30}" text-anchor="middle">{title}</text>')
    parts.append(f'<text x="0" y="-10">{said}</text>')
    for tick in range(round(low * 10), 11, 1):
        y = place(0, tick / 10).partition(",")[2]
        parts.append(f'<line x1="0" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#eee"/>')
        parts.append(f'<text x="-6" y="{float(y) + 4}" text-anchor="end">{tick * 10}%</text>')
    for quarter in range(5):
        x = quarter / 4 * _WIDTH
        parts.append(f'<text x="{x}" y="{_HEIGHT + 15}" text-anchor="middle">{most * quarter / 4:.0f}</text>')
    for colour, band in zip(_COLOURS, curves.values(), strict=False):
        points = list(zip(band.x, band.y, band.half, strict=True))
        upper = [place(x, min(1.0, y + h)) for x, y, h in points]
        lower = [place(x, max(low, y - h)) for x, y, h in reversed(points)]
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.12"/>')
        line = " ".join(place(x, y) for x, y, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts
