"""The summary of a run as text: the rows of the table at its end, and of its report."""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.apps.summary import STARTING, Summary
from dora_rl.core.types import Version

MANY_WITHOUT_SIGNAL = 0.5
"""Share of groups without signal above which the summary says what to change."""


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The summary as pairs of name and value."""
    done = f"{summary.steps} of {summary.steps_asked}" if summary.steps_asked is not None else str(summary.steps)
    return [
        ("mode", f"{summary.mode}, staleness at most {_bound(summary)}"),
        ("steps", f"{done}, {summary.state}"),
        ("trained tokens", f"{summary.tokens:,}"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f} over {duration(summary.seconds)}"),
        ("step", f"{duration(summary.step_seconds)} (median)"),
        ("occupancy", f"{summary.occupancy:.0%}"),
        ("idle slots", idle(summary.slots) or "none"),
        ("staleness of groups", _staleness(summary) or "none trained"),
        ("live versions", f"{summary.most_live} at most"),
        ("requests moved", f"{summary.moved:,}; prefilled again: {summary.reprefilled:,} tokens"),
        ("log-prob gap", _gap(summary)),
        ("failed trajectories", counts(summary.failed) or "none"),
        *([("groups without signal", _without_signal(summary))] if summary.without_signal else []),
        ("reward", change(summary.rewards)),
        ("held-out accuracy", accuracy(summary)),
        *([("best version", best(summary.best))] if summary.best is not None else []),
        ("ledger", f"{summary.ledger_share:.1%} of the time"),
        ("processes restarted", counts(summary.restarts) or "none"),
    ]


def duration(seconds: float) -> str:
    """A duration with its unit."""
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def histogram(staleness: Mapping[int, int]) -> str:
    """`0: 25%  1: 75%`."""
    whole = sum(staleness.values())
    return "  ".join(f"{age}: {count / whole:.0%}" for age, count in sorted(staleness.items()))


def _staleness(summary: Summary) -> str:
    """`mean 0.75 (0: 25%  1: 75%); latency 0.61 steps`."""
    mean = summary.mean_staleness
    if mean is None:
        return ""
    latency = "" if summary.latency_in_steps is None else f"; latency {summary.latency_in_steps:.2f} steps"
    return f"mean {mean:.2f} ({histogram(summary.staleness)}){latency}"


def idle(slots: Mapping[str, float], most: int = 3) -> str:
    """The most frequent causes of idle slot time, with their shares."""
    causes = [(label, share) for label, share in slots.items() if label.startswith("idle: ") and label != STARTING]
    return ", ".join(f"{label.removeprefix('idle: ')} {share:.1%}" for label, share in causes[:most] if share >= 0.0005)


def _bound(summary: Summary) -> str:
    """`3`, or `8 (auto, now 3)`."""
    auto = "" if summary.auto_bound is None else f" (auto, now {summary.auto_bound})"
    return f"{summary.max_staleness}{auto}"


def _gap(summary: Summary) -> str:
    mean = "not measured" if summary.gap is None else f"{summary.gap:.1e} between engine and trainer"
    if not summary.alarms:
        return mean
    steps = f"{len(summary.alarms)} step{'s' if len(summary.alarms) > 1 else ''}"
    return f"{mean}; TOO LARGE in {steps}, at most {max(summary.alarms.values()):.1e}"


def _without_signal(summary: Summary) -> str:
    """`12 of 40 were replaced (reward 1: 9; reward 0: 3)`, with a hint if most of the generation was for them."""
    count = sum(summary.without_signal.values())
    rewards = counts({f"reward {reward:g}": some for reward, some in summary.without_signal.items()})
    text = f"{count} of {summary.groups} were replaced ({rewards})"
    if count <= MANY_WITHOUT_SIGNAL * summary.groups:
        return text
    most = next(iter(summary.without_signal))
    return f"{text}: MOST OF THE GENERATION TRAINED NOTHING, choose prompts whose rewards are not always {most:g}"


def counts(numbers: Mapping[str, int]) -> str:
    """`timeout: 3; reward raised: 1`."""
    return "; ".join(f"{name}: {count}" for name, count in numbers.items())


def change(pair: tuple[float, float] | None) -> str:
    """A value in the first and in the last step."""
    return "no steps" if pair is None else f"{pair[0]:.3f} -> {pair[1]:.3f}"


def best(result: tuple[Version, float]) -> str:
    """The version with the highest held-out accuracy."""
    return f"{result[1]:.1%} (v{result[0]})"


def accuracy(summary: Summary) -> str:
    """Held-out accuracy of the first and of the last version evaluated."""
    if summary.accuracy is None:
        return "not evaluated"
    (first, before), (last, after) = summary.accuracy
    return f"{before:.1%} (v{first}) -> {after:.1%} (v{last})" if last != first else f"{before:.1%} (v{first})"
