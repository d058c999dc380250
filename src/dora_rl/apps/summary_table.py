"""The figures of a run in words: the same rows in the table at its end and at the head of its report."""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.apps.summary import STARTING, Summary


def rows(summary: Summary) -> list[tuple[str, str]]:
    """What is said of a run, as name and value."""
    done = f"{summary.steps} of {summary.steps_asked}" if summary.steps_asked is not None else str(summary.steps)
    return [
        ("mode", f"{summary.mode}, staleness at most {summary.max_staleness}"),
        ("steps", f"{done}, {summary.state}"),
        ("trained tokens", f"{summary.tokens:,}"),
        ("tokens/s", f"{summary.tokens_per_second:,.0f} over {duration(summary.seconds)}"),
        ("step", f"{duration(summary.step_seconds)} (median)"),
        ("occupancy", f"{summary.occupancy:.0%}"),
        ("slots idle", idle(summary.slots) or "never"),
        ("staleness of groups", _staleness(summary.staleness) or "none trained"),
        ("live versions", f"{summary.most_live} at most"),
        ("requests moved", f"{summary.moved:,}; prefilled again: {summary.reprefilled:,} tokens"),
        ("log-prob gap", _gap(summary)),
        ("failed verdicts", _counts(summary.failed) or "none"),
        ("reward", _change(summary.rewards)),
        ("held-out accuracy", _accuracy(summary)),
        ("ledger", f"{summary.ledger_share:.1%} of the time"),
        ("processes restarted", _counts(summary.restarts) or "none"),
    ]


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def histogram(staleness: Mapping[int, int]) -> str:
    """`0: 25%  1: 75%`."""
    whole = sum(staleness.values())
    return "  ".join(f"{age}: {count / whole:.0%}" for age, count in sorted(staleness.items()))


def _staleness(staleness: Mapping[int, int]) -> str:
    """`mean 0.75 (0: 25%  1: 75%)`."""
    if not staleness:
        return ""
    mean = sum(age * count for age, count in staleness.items()) / sum(staleness.values())
    return f"mean {mean:.2f} ({histogram(staleness)})"


def idle(slots: Mapping[str, float], most: int = 3) -> str:
    """The causes that cost most slot time, with their shares."""
    causes = [(label, share) for label, share in slots.items() if label.startswith("idle: ") and label != STARTING]
    return ", ".join(f"{label.removeprefix('idle: ')} {share:.1%}" for label, share in causes[:most] if share >= 0.0005)


def _gap(summary: Summary) -> str:
    said = "not measured" if summary.gap is None else f"{summary.gap:.1e} between engine and trainer"
    if not summary.alarms:
        return said
    steps = f"{len(summary.alarms)} step{'s' if len(summary.alarms) > 1 else ''}"
    return f"{said}; TOO FAR in {steps}, {max(summary.alarms.values()):.1e} in the worst"


def _counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name}: {count}" for name, count in counts.items())


def _change(pair: tuple[float, float] | None) -> str:
    return "no step" if pair is None else f"{pair[0]:.3f} -> {pair[1]:.3f}"


def _accuracy(summary: Summary) -> str:
    if summary.accuracy is None:
        return "not evaluated"
    (first, before), (last, after) = summary.accuracy
    return f"{before:.1%} (v{first}) -> {after:.1%} (v{last})" if last != first else f"{before:.1%} (v{first})"
