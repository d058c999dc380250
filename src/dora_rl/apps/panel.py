"""The progress of a run as text: a panel for terminals, and one line for a step. All values are in `PanelValues`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dora_rl.apps.summary import shares
from dora_rl.apps.summary_table import duration, histogram, idle
from dora_rl.core.time_accounting import occupancy
from dora_rl.core.types import Version

_SPARKS = "▁▂▃▄▅▆▇█"
_WIDTH = 24


@dataclass(kw_only=True, slots=True)
class PanelValues:
    """What is shown of a run at one time."""

    done: int
    """Steps that are trained."""
    asked: int | None
    """Steps that are asked for; None: as many as the prompts suffice for."""
    seconds: float
    """The run's clock."""
    last: Mapping[str, Any]
    """Metrics of the last step."""
    rewards: Sequence[float]
    """Mean reward of each step."""
    accuracy: Sequence[tuple[Version, float]]
    """Held-out accuracy of each version that was evaluated."""
    recent: Sequence[tuple[float, float]]
    """Tokens and seconds of each recent step."""
    time: Counter[str]
    """Time of all slots by activity, idle time as `idle: cause`."""
    staleness: Counter[int]
    """Trained groups by staleness."""
    running: Mapping[Version, int] = field(default_factory=dict)
    """Requests on slots, by version."""
    waiting: Mapping[Version, int] = field(default_factory=dict)
    """Requests without a slot, by version."""
    trainer: str
    bound: int | None = None
    """The staleness bound in force, if the run chooses it."""

    @property
    def rate(self) -> float:
        """Trained tokens per second over the recent steps."""
        seconds = sum(seconds for _, seconds in self.recent)
        return sum(tokens for tokens, _ in self.recent) / seconds if seconds else 0.0


def step_line(values: PanelValues) -> str:
    """One line about the last step."""
    last = values.last
    fields = [f"steps done {values.done}{_asked(values)}", f"reward {values.rewards[-1]:.3f}"]
    if values.accuracy:
        fields.append("accuracy {1:.1%} (v{0})".format(*values.accuracy[-1]))
    fields += [
        f"{values.rate:,.0f} tokens/s",
        f"{last['timing_s/step']:.2f} s",
        f"occupancy {occupancy(values.time):.0%}",
        f"staleness {last['off_policy/trajectory_staleness']:.1f}{_bound(values)}",
        f"live versions {last['rollout/live_versions']:.0f}",
    ]
    return "  ".join(fields)


def panel(values: PanelValues) -> Group:
    """The panel: a progress bar and a table."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(values):
        table.add_row(name, value)
    return Group(_bar(values), table)


def _bar(values: PanelValues) -> Table:
    bar = Table.grid(padding=(0, 1, 0, 0))
    progress = ProgressBar(total=values.asked, completed=values.done, width=_WIDTH, pulse=values.asked is None)
    bar.add_row(Text(f"steps done {values.done}{_asked(values)}", style="bold"), progress, _left(values))
    return bar


def _rows(values: PanelValues) -> list[tuple[str, str]]:
    rows = []
    if values.rewards:
        rows.append(("reward", f"{values.rewards[-1]:.3f}  {sparks(values.rewards)}"))
    if values.accuracy:
        (first, before), (last, now) = values.accuracy[0], values.accuracy[-1]
        rows.append(("held-out", f"{before:.1%} (v{first})" + (f" -> {now:.1%} (v{last})" if last != first else "")))
    rows.append(("rollout", f"{values.rate:,.0f} tokens/s trained, occupancy {occupancy(values.time):.0%}"))
    rows.append(("versions", _versions(values)))
    rows.append(("staleness", (histogram(values.staleness) or "nothing trained yet") + _bound(values)))
    rows.append(("idle slots", idle(shares(values.time)) or "none"))
    rows.append(("trainer", values.trainer))
    return rows


def _versions(values: PanelValues) -> str:
    """Live versions, newest first, with their running and waiting requests."""
    running, waiting = values.running, values.waiting
    live = sorted({v for v, count in (*running.items(), *waiting.items()) if count}, reverse=True)
    named = [
        f"v{version}: {running.get(version, 0)}" + (f" + {waiting[version]} waiting" if waiting.get(version) else "")
        for version in live
    ]
    return "  ".join(named) + "  requests" if named else "no requests"


def _bound(values: PanelValues) -> str:
    return "" if values.bound is None else f" (at most {values.bound})"


def _asked(values: PanelValues) -> str:
    return "" if values.asked is None else f"/{values.asked}"


def _left(values: PanelValues) -> str:
    elapsed = duration(values.seconds)
    if not values.recent:
        return "starting"
    if values.asked is None or values.asked == values.done:
        return f"{elapsed} elapsed"
    each = sum(seconds for _, seconds in values.recent) / len(values.recent)
    return f"{elapsed} elapsed, about {duration(each * (values.asked - values.done))} left"


def sparks(values: Sequence[float], width: int = _WIDTH) -> str:
    """A curve in one line of text: the means of equal intervals, scaled between the lowest and the highest."""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
