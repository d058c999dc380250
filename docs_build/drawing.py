"""Draws recorded runs as SVG timelines: one panel for each mode, one lane for the trainer and for each instance.

The same recording gives the same bytes, so that a picture changes in the repository only when the scheduling does. A
picture has a background of its own, which follows the reader's colour scheme, so its text is readable on any page. The
colours of versions are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from docs_build.recording import Moment, Recording
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.time_accounting import Segment
from dora_rl.core.types import SECOND, Nanoseconds, SlotId, Version

WIDTH = 960
_LEFT, _RIGHT = 92, 16
_LANE, _GAP = 26, 5
_HEAD = 52
"""Height of a panel's title and of the version tags below it."""
_FOOT = 56
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_STYLE = """
  svg { --paper: #ffffff; --ink: #1f2328; --dim: #59636e; --lane: #f0f2f4; --idle: #c9d0d7; --work: #59636e; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #15191e; --ink: #e6edf3; --dim: #9aa4af; --lane: #232a31; --idle: #48525c; --work: #9aa4af; } }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
  .title { font-size: 16px; font-weight: 600; } .dim { fill: var(--dim); font-size: 12px; }
  .in { fill: var(--paper); font-size: 11px; } .tag { fill: #ffffff; font-size: 11px; font-weight: 600; }
  .paper { fill: var(--paper); } .lane { fill: var(--lane); } .idle { stroke: var(--idle); stroke-width: 2; }
  .train { fill: var(--work); } .shared { fill: var(--work); fill-opacity: .45; } .load { fill: var(--idle); }
  .new { stroke: var(--dim); stroke-width: 1; stroke-dasharray: 2 3; }
  .move { stroke: var(--ink); stroke-width: 1.2; fill: none; } .end { fill: var(--ink); }
  .now { stroke: var(--ink); stroke-width: 1.5; }
"""
_HATCHING = """<defs>
<pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<line class="idle" x1="0" y1="0" x2="0" y2="7"/></pattern></defs>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of a recording, with its title."""

    recording: Recording
    title: str
    about: str
    start: Nanoseconds
    seconds: float
    """Width of the panel in time."""
    until: Nanoseconds | None = None
    """What comes later is not drawn yet; unset means that everything is."""

    @property
    def height(self) -> int:
        return _HEAD + (len(self.recording.slots) + 1) * (_LANE + _GAP)

    @property
    def end(self) -> Nanoseconds:
        return self.start + round(self.seconds * SECOND)

    @property
    def drawn_until(self) -> Nanoseconds:
        return self.end if self.until is None else min(self.end, self.until)

    def x(self, time: Nanoseconds) -> float:
        inside = min(max(time, self.start), self.drawn_until)
        return _LEFT + (inside - self.start) / SECOND / self.seconds * (WIDTH - _LEFT - _RIGHT)


def picture(panels: Sequence[Panel], *, about: str) -> str:
    """An SVG file with the panels below each other, on the same scale, and a legend; `about` is its description."""
    most = max(panel.recording.fullest for panel in panels)
    height = sum(panel.height + 14 for panel in panels) + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(about)}</title>",
        f"<style>{_STYLE}</style>",
        _HATCHING,
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    top = 10
    for panel in panels:
        lines += [f'<g transform="translate(0 {top})">', *_panel(panel, most), "</g>"]
        top += panel.height + 14
    versions = any(moment.label is ActivityLabel.LOAD for panel in panels for moment in _shown(panel))
    return "\n".join([*lines, *_legend(top, loads=versions), "</svg>"]) + "\n"


def colour(version: Version) -> str:
    """Neighbouring versions differ."""
    return _COLOURS[version % len(_COLOURS)]


def _shown(panel: Panel) -> Iterator[Moment]:
    for moments in panel.recording.slots.values():
        yield from (one for one in moments if one.end > panel.start and one.start < panel.drawn_until)


def _panel(panel: Panel, most: int) -> Iterator[str]:
    recording = panel.recording
    yield f'<text class="title" x="14" y="18">{escape(panel.title)}</text>'
    yield f'<text class="dim" x="{WIDTH - _RIGHT}" y="18" text-anchor="end">{escape(panel.about)}</text>'
    right = WIDTH - _RIGHT
    lanes = {slot: _HEAD + (number + 1) * (_LANE + _GAP) for number, slot in enumerate(recording.slots)}
    for name, y in (("trainer", _HEAD), *((f"instance {n}", y) for n, y in enumerate(lanes.values()))):
        yield f'<text x="14" y="{y + _LANE / 2 + 4.5:g}">{name}</text>'
        yield f'<rect class="lane" x="{_LEFT}" y="{y}" width="{right - _LEFT}" height="{_LANE}" rx="3"/>'
    yield from _trainer(panel, recording.trainer)
    for slot, y in lanes.items():
        yield from _slot(panel, recording.slots[slot], y, most)
    yield from _published(panel)
    yield from _moves(panel, lanes)
    if panel.until is not None and panel.until < panel.end:
        x = panel.x(panel.until)
        yield f'<line class="now" x1="{x:.1f}" y1="{_HEAD - 6}" x2="{x:.1f}" y2="{panel.height}"/>'


def _trainer(panel: Panel, segments: Iterable[Segment]) -> Iterator[str]:
    """Steps as blocks, idle time hatched; publishing belongs to the step before."""
    for segment in segments:
        left, right = panel.x(segment.start), panel.x(segment.end)
        if right - left < 0.2:
            continue
        if segment.activity.label is ActivityLabel.IDLE:
            about = f"idle, waiting for {segment.activity.cause}"
            yield _rect(left, _HEAD, right, _LANE, 'fill="url(#idle)"', about)
        else:
            about = f"{segment.activity.label.value} {segment.activity.version}"
            yield _rect(left, _HEAD, right, _LANE, 'class="train"', about)
            if segment.activity.label is ActivityLabel.TRAIN and right - left > 44:
                x = (left + right) / 2
                step = segment.activity.version
                yield f'<text class="in" x="{x:.1f}" y="{_HEAD + 17}" text-anchor="middle">step {step}</text>'


def _slot(panel: Panel, moments: Iterable[Moment], y: int, most: int) -> Iterator[str]:
    shown = [one for one in moments if panel.x(one.end) - panel.x(one.start) > 0]
    for kind, several in groupby(shown, key=_kind):
        run = list(several)
        left, right = panel.x(run[0].start), panel.x(run[-1].end)
        if kind[0] == "work":
            yield _batch(panel, run, y, most)
        elif kind[0] == "idle":
            yield _rect(left, y, right, _LANE, 'fill="url(#idle)"', f"idle, waiting for {run[0].cause}")
        else:
            yield _rect(left, y, right, _LANE, f'class="{kind[0]}"', str(kind[0]))


def _kind(moment: Moment) -> tuple[str, object]:
    """What moments that are drawn as one shape have in common."""
    if moment.label is ActivityLabel.TRAIN:
        return "shared", None
    if moment.requests:
        return "work", moment.version
    if moment.label is ActivityLabel.LOAD:
        return "load", None
    return "idle", moment.cause


def _batch(panel: Panel, run: list[Moment], y: int, most: int) -> str:
    """The requests of one version in one slot; by the square root, so that a single request can be seen."""
    base = y + _LANE
    path = f"M{panel.x(run[0].start):.1f} {base}"
    for moment in run:
        top = base - _LANE * (moment.requests / most) ** 0.5
        path += f"V{top:.1f}H{panel.x(moment.end):.1f}"
    version = run[0].version
    assert version is not None, "a slot without a version has no requests"
    return f'<path fill="{colour(version)}" d="{path}V{base}Z"><title>version {version}</title></path>'


def _published(panel: Panel) -> Iterator[str]:
    """A line for each version; tags are moved to the right where they would cover each other."""
    last = 0.0
    for version, when in panel.recording.published.items():
        if not panel.start <= when <= panel.drawn_until:
            continue
        x = panel.x(when)
        yield f'<line class="new" x1="{x:.1f}" y1="{_HEAD - 8}" x2="{x:.1f}" y2="{panel.height}"/>'
        last = min(max(x, _LEFT + 15, last + 31), WIDTH - _RIGHT - 15)
        yield f'<rect x="{last - 15:.1f}" y="{_HEAD - 24}" width="30" height="16" rx="8" fill="{colour(version)}"/>'
        yield f'<text class="tag" x="{last:.1f}" y="{_HEAD - 12}" text-anchor="middle">v{version}</text>'


def _moves(panel: Panel, lanes: dict[SlotId, int]) -> Iterator[str]:
    for when, source, target, count in panel.recording.moves:
        if not panel.start <= when <= panel.drawn_until:
            continue
        x, start, end = panel.x(when), lanes[source] + _LANE / 2, lanes[target] + _LANE / 2
        about = f"{count} request{'s' if count > 1 else ''} moved with KV"
        yield f"<g><title>{about}</title>{_arc(x, start, end)}</g>"


def _rect(left: float, y: float, right: float, height: float, style: str, about: str) -> str:
    return (
        f'<rect {style} x="{left:.1f}" y="{y:g}" width="{right - left:.1f}" height="{height:g}">'
        f"<title>{escape(about)}</title></rect>"
    )


def _legend(top: int, *, loads: bool) -> Iterator[str]:
    y, x = top + 4, _LEFT
    for number, one in enumerate(_COLOURS[:4]):
        yield f'<rect x="{x + 12 * number}" y="{y}" width="12" height="12" fill="{one}"/>'
    yield _dim(x + 56, y, "requests by version: the fuller the batch, the higher")
    x += 384
    entries = [('class="lane"', 'fill="url(#idle)"', "waiting", 92), ('class="train"', "", "training", 96)]
    entries += [('class="load"', "", "loading weights", 138)] if loads else []
    for below, above, words, width in entries:
        for style in filter(None, (below, above)):
            yield f'<rect {style} x="{x}" y="{y}" width="24" height="12"/>'
        yield _dim(x + 32, y, words)
        x += width
    yield _arc(x, y - 3, y + 14)
    yield _dim(x + 18, y, "move with KV")
    yield _dim(_LEFT, y + 21, "Time runs to the right, on the same scale in all panels.")


def _dim(x: float, y: float, words: str) -> str:
    return f'<text class="dim" x="{x:g}" y="{y + 10.5:g}">{words}</text>'


def _arc(x: float, start: float, end: float) -> str:
    """A move from one height to another; a dot marks its end."""
    bend = x + 12
    return (
        f'<path class="move" d="M{x:.1f} {start:g}C{bend:.1f} {start:g} {bend:.1f} {end:g} {x:.1f} {end:g}"/>'
        f'<circle class="end" cx="{x:.1f}" cy="{end:g}" r="3"/>'
    )
