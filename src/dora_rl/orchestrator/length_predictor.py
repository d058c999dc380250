"""Predicts how many more tokens a trajectory will generate, from the lengths observed so far.

Lengths are counted in logarithmic buckets, an eighth of an octave wide: fine enough to plan with (9%), and a run of
any length needs a few hundred integers. Since no trajectory is ever dropped, the sample has no bias by length.
"""

from __future__ import annotations

import math

_BUCKETS_PER_OCTAVE = 8


class LengthPredictor:
    """Conditional quantiles of the remaining length."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._counts = [0] * (_bucket(longest) + 1)
        self.observed = 0
        """Number of trajectories observed."""
        self._sum = 0
        self._sum_of_squares = 0

    def observe(self, tokens: int) -> None:
        """A trajectory ended with this many tokens."""
        self._counts[min(_bucket(tokens), len(self._counts) - 1)] += 1
        self.observed += 1
        self._sum += tokens
        self._sum_of_squares += tokens * tokens

    def mean_context(self) -> float:
        """Response tokens that a running request holds, averaged over time: E[L^2] / (2 E[L])."""
        return self._sum_of_squares / (2 * self._sum) if self._sum else 0.0

    def survival(self, tokens: float) -> float:
        """Share of trajectories that are longer than this."""
        if not self.observed:
            return 1.0
        return sum(self._counts[_bucket(int(tokens)) + 1 :]) / self.observed

    def remaining(self, tokens: int, quantile: float) -> int:
        """Tokens still to come for a trajectory that has `tokens`, exceeded with probability 1 - `quantile`."""
        limit = max(0, self._longest - tokens)
        start = _bucket(tokens)
        longer = sum(self._counts[start + 1 :])
        if not longer:
            # It is longer than all observed ones: expect the same length again, as a heavy tail has it.
            return min(limit, max(tokens, 1))
        wanted = math.ceil(quantile * longer)
        passed = 0
        for bucket in range(start + 1, len(self._counts)):
            passed += self._counts[bucket]
            if passed >= wanted:
                return max(1, min(limit, round(2 ** ((bucket + 1) / _BUCKETS_PER_OCTAVE)) - tokens))
        return limit

    def check(self) -> None:
        """Assert that each observed trajectory is in one bucket."""
        assert sum(self._counts) == self.observed, f"{sum(self._counts)} lengths in buckets, {self.observed} observed"


def _bucket(tokens: int) -> int:
    return int(math.log2(tokens) * _BUCKETS_PER_OCTAVE) if tokens > 1 else 0
