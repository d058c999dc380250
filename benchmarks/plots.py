"""Plots of the docs as SVG files: bars, learning curves, predictions against measurements, and growth of costs.

The same figures give the same bytes, so that a plot changes in the repository only when its figures do: element ids are
salted with a constant and no date or version is written. Text stays text, so it can be searched and scales with the
page. Colours are those of Okabe and Ito, which colour-blind readers can tell apart; series of points and lines differ
in their marker and line style too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#4d4d4d", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#f0e442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dora-rl",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
}
_WIDTH = 8.5
"""Inches: at this width the text of a plot is as large as the text of a README beside it."""


class Spread(NamedTuple):
    """The median of repeats, and their lowest and highest value."""

    median: float
    low: float
    high: float


class Band(NamedTuple):
    """A curve and half the width of its band at each point."""

    x: list[float]
    y: list[float]
    half: list[float]


def bars(path: Path, title: str, groups: dict[str, dict[str, Spread]]) -> None:
    """Groups of bars by name, each with a whisker from its lowest to its highest repeat."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.85 / max(1, len(names))
    with _figure(path, 4.2) as figure:
        axes = _axes(figure, title)
        for number, name in enumerate(names):
            present = [(place, group[name]) for place, group in enumerate(groups.values()) if name in group]
            medians = [spread.median for _, spread in present]
            whiskers = (
                [spread.median - spread.low for _, spread in present],
                [spread.high - spread.median for _, spread in present],
            )
            axes.bar(
                [place + (number - (len(names) - 1) / 2) * width for place, _ in present],
                medians,
                width=0.9 * width,
                yerr=whiskers,
                color=COLOURS[number % len(COLOURS)],
                error_kw={"linewidth": 1.0, "capsize": 2.5, "ecolor": "#222222"},
                label=name,
            )
        axes.set_xticks(range(len(groups)), list(groups))
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        figure.legend(loc="outside lower center", ncols=min(4, len(names)))


def curves(path: Path, title: str, series: dict[str, tuple[Band, Band]]) -> None:
    """Accuracy with its band, against steps on the left and against seconds on the right."""
    with _figure(path, 4.4) as figure:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        both = figure.subplots(1, 2, sharey=True)
        for panel, (axes, label) in enumerate(zip(both, ("steps", "seconds"), strict=True)):
            styles = zip(COLOURS, cycle(_MARKERS), cycle(_LINES), strict=False)
            for (name, bands), (colour, marker, line) in zip(series.items(), styles, strict=False):
                band = bands[panel]
                low = [max(0.0, y - half) for y, half in zip(band.y, band.half, strict=True)]
                high = [min(1.0, y + half) for y, half in zip(band.y, band.half, strict=True)]
                axes.fill_between(band.x, low, high, color=colour, alpha=0.13, linewidth=0)
                style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line}
                axes.plot(band.x, band.y, **style, markersize=4, clip_on=False, label=_once(name, panel))
            axes.set_xlabel(label)
            axes.set_xlim(left=0)
            axes.set_ylim(*_limits([band for bands in series.values() for band in bands]))
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        both[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        figure.legend(loc="outside lower center", ncols=min(3, len(series)))


def predictions(path: Path, title: str, series: dict[str, list[tuple[float, float]]], aim: float) -> None:
    """Points (measured, predicted) around the line on which both are equal, with the aim as a band."""
    values = [value for points in series.values() for point in points for value in point] or [1.0]
    low, high = 0.9 * min(values), 1.05 * max(values)
    with _figure(path, 4.4) as figure:
        axes = _axes(figure, title)
        axes.grid(visible=True, axis="both")
        ends = [low, high]
        axes.fill_between(
            ends,
            [(1 - aim) * end for end in ends],
            [(1 + aim) * end for end in ends],
            color="#56b4e9",
            alpha=0.18,
            linewidth=0,
            label=f"within {aim:.0%}",
        )
        axes.plot(ends, ends, color="#888888", linewidth=1)
        for (name, points), colour, marker in zip(series.items(), COLOURS[4:] + COLOURS[:4], _MARKERS, strict=False):
            measured, predicted = zip(*points, strict=True)
            axes.scatter(measured, predicted, color=colour, marker=marker, s=32, label=name)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("measured")
        axes.set_ylabel("predicted")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_thousands))
        figure.legend(loc="outside right upper")


def growth(path: Path, title: str, series: dict[str, tuple[list[float], list[float]]]) -> None:
    """Costs relative to the first one, both axes logarithmic."""
    with _figure(path, 5.0) as figure:
        axes = _axes(figure, title)
        axes.grid(visible=True, axis="both")
        styles = zip(COLOURS, cycle(_MARKERS), cycle(_LINES), strict=False)
        for (name, (xs, ys)), (colour, marker, line) in zip(series.items(), styles, strict=False):
            along, costs = [x / xs[0] for x in xs], [y / ys[0] for y in ys]
            axes.plot(along, costs, color=colour, marker=marker, linestyle=line, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("size, times the smallest")
        axes.set_ylabel("cost, times that of the smallest")
        figure.legend(loc="outside lower center", ncols=2)


@contextmanager
def _figure(path: Path, height: float) -> Iterator[Figure]:
    """A figure that is written to the path when the block ends."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, height), facecolor="white")
        yield figure
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    # Its writer leaves spaces at the end of lines.
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text(encoding="utf-8").splitlines()))


def _axes(figure: Figure, title: str) -> Axes:
    axes = figure.add_subplot()
    axes.set_title(title)
    return axes


def _limits(bands: list[Band]) -> tuple[float, float]:
    """Whole tenths around all bands, and at least 30 points, so that noise does not look like learning."""
    low = min(y - half for band in bands for y, half in zip(band.y, band.half, strict=True))
    high = max(y + half for band in bands for y, half in zip(band.y, band.half, strict=True))
    bottom = max(0.0, math.floor(10 * low) / 10)
    return bottom, max(min(1.0, math.ceil(10 * high) / 10), bottom + 0.3)


def _once(name: str, panel: int) -> str:
    """The name in the first panel only: a name with an underscore stays out of the legend."""
    return name if panel == 0 else f"_{name}"


def _thousands(value: float, _: int | None = None) -> str:
    return f"{value:,.0f}"
