"""Small charts as one SVG image, for places where no script runs, such as a model card.

The report page draws its charts with a script; a card can't. A plotting library would be a dependency of every
installation for three pictures. Colours are fixed and on a white ground, since an image does not know whether the page
around it is dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT = 330, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 34, 36
_DIM, _LINE = "#5c6570", "#d8dce0"
_COLOURS = ("#2563c4", "#d9480f", "#2b8a3e")
_WIDEST_BAR = 60.0

Point = tuple[float, float]


class Panel(NamedTuple):
    """One chart: a curve, or bars if the values are counts by label."""

    title: str
    x: str
    """What the horizontal axis shows."""
    curve: Sequence[Point] = ()
    bars: Mapping[str, int] | None = None
    dots: bool = False
    """Whether each point of the curve is marked."""


def draw(panels: Sequence[Panel]) -> str:
    """The panels beside each other, as an SVG document."""
    width = _WIDTH * len(panels)
    inside = "".join(
        f'<g transform="translate({number * _WIDTH} 0)">{_panel(panel, _COLOURS[number % len(_COLOURS)])}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>'
        f"{inside}</svg>\n"
    )


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two values, at most about `most` of them."""
    raw = (high - low) / most
    if raw <= 0 or not math.isfinite(raw):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _panel(panel: Panel, colour: str) -> str:
    title = (
        f'<text x="{_LEFT}" y="18" font-size="13" font-weight="600" fill="#1c2126">{html.escape(panel.title)}</text>'
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    under = _text(middle, _HEIGHT - 5, "middle", panel.x)
    body = "".join(_curve(panel, colour) if panel.bars is None else _bars(panel.bars, colour))
    return title + (body + under if body else _text(middle, _HEIGHT / 2, "middle", "nothing recorded"))


def _curve(panel: Panel, colour: str) -> Iterator[str]:
    points = [(x, y) for x, y in panel.curve if math.isfinite(y)]
    if not points:
        return
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(0.0, *(y for _, y in points)), max(0.0, *(y for _, y in points))
    high = high + 0.05 * (high - low) if high > low else low + 1.0
    yield from _grid(low, high)
    for value in ticks(left, right, 5):
        yield _text(_across(value, left, right), _HEIGHT - _BOTTOM + 15, "middle", _number(value))
    places = [(_across(x, left, right), _up(y, low, high)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
    if panel.dots or len(places) < 3:
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)


def _bars(bars: Mapping[str, int], colour: str) -> Iterator[str]:
    if not bars:
        return
    high = max(1, *bars.values()) * 1.05
    yield from _grid(0.0, high)
    room = (_WIDTH - _LEFT - _RIGHT) / len(bars)
    wide = min(room - 4, _WIDEST_BAR)
    every = math.ceil(len(bars) / 10)
    for number, (label, count) in enumerate(bars.items()):
        middle, top = _LEFT + (number + 0.5) * room, _up(count, 0.0, high)
        yield (
            f'<rect x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}" fill="{colour}"/>'
        )
        if number % every == 0:
            yield _text(middle, _HEIGHT - _BOTTOM + 15, "middle", label)


def _grid(low: float, high: float) -> Iterator[str]:
    for value in ticks(low, high, 5):
        y = _up(value, low, high)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_LINE}"/>'
        yield _text(_LEFT - 6, y + 4, "end", _number(value))


def _across(value: float, left: float, right: float) -> float:
    share = (value - left) / (right - left) if right > left else 0.5
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _up(value: float, low: float, high: float) -> float:
    return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_DIM}">{html.escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
