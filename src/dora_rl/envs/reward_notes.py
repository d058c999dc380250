"""What a reward function logs while it is called: TRL's `log_metric` and `log_extra`.

Invariants:
- notes belong to one call, so that calls in several threads do not mix;
- a wrong argument raises in the user's function, and the failure names that function;
- notes are few and small, since they are recorded with their trajectory: see `MOST` and `LONGEST`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, TypeAlias

Note: TypeAlias = bool | int | float | str | None
"""A value that `log_extra` records."""

MOST = 32
"""Names kept from one call: each metric becomes one of the run."""
LONGEST = 1000
"""Characters kept of a text."""
_LARGEST = 1e300
"""Larger numbers are left out, so that the sums over a step stay finite."""


class Notes:
    """What one call of a reward function logs about its completions."""

    def __init__(self, completions: int) -> None:
        self._completions = completions
        self._metrics: dict[str, list[float]] = {}
        self._extra: dict[str, list[Note]] = {}

    def log_metric(self, name: str, value: Any) -> None:
        """Record a number; its mean becomes a metric of the step."""
        key, number = clean(name), float(value)
        if abs(number) < _LARGEST and (key in self._metrics or len(self._metrics) < MOST):  # False for NaN, too
            self._metrics.setdefault(key, []).append(number)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Record one value for each completion, which is written with its sample."""
        key, listed = clean(column), list(values)
        if len(listed) != self._completions:
            raise ValueError(f"log_extra('{column}') has {len(listed)} values for {self._completions} completions")
        if key in self._extra or len(self._extra) < MOST:
            self._extra[key] = [_note(value) for value in listed]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the call."""
        return {name: statistics.fmean(values) for name, values in self._metrics.items()}

    def about(self, index: int) -> dict[str, Note]:
        """The values of one completion."""
        return {column: values[index] for column, values in self._extra.items()}


def clean(text: Any) -> str:
    """A text that can be stored: surrogates that Python strings may have are replaced."""
    return str(text).encode("utf-8", "replace").decode()


def _note(value: Any) -> Note:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return clean(value)[:LONGEST]
