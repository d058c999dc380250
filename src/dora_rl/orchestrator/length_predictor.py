"""How much longer a trajectory will run, from the lengths seen so far.

Lengths are counted in logarithmic buckets, an eighth of an octave wide: fine enough to plan with (9%), and a run of
any length needs a few hundred integers. Since no trajectory is ever dropped, the sample has no bias by length.
"""

from __future__ import annotations

import math

_PER_OCTAVE = 8


class LengthPredictor:
    """Conditional quantiles of the remaining length."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._counts = [0] * (_bucket(longest) + 1)
        self.seen = 0
        self._sum = 0
        self._squares = 0

    def observe(self, tokens: int) -> None:
        """A trajectory ended with so many tokens."""
        self._counts[min(_bucket(tokens), len(self._counts) - 1)] += 1
        self.seen += 1
        self._sum += tokens
        self._squares += tokens * tokens

    def mean_context(self) -> float:
        """Response tokens that a running request holds, averaged over time: E[L^2] / (2 E[L])."""
        return self._squares / (2 * self._sum) if self._sum else 0.0

    def survival(self, tokens: float) -> float:
        """Share of trajectories that are longer than so many tokens."""
        if not self.seen:
            return 1.0
        return sum(self._counts[_bucket(int(tokens)) + 1 :]) / self.seen

    def remaining(self, tokens: int, quantile: float) -> int:
        """Tokens still to come for one that has `tokens`, exceeded with probability 1 - `quantile`."""
        ahead = max(0, self._longest - tokens)
        start = _bucket(tokens)
        beyond = sum(self._counts[start + 1 :])
        if not beyond:
            # Older than all seen: as long again, which is what a heavy tail does.
            return min(ahead, max(tokens, 1))
        wanted = math.ceil(quantile * beyond)
        passed = 0
        for bucket in range(start + 1, len(self._counts)):
            passed += self._counts[bucket]
            if passed >= wanted:
                return max(1, min(ahead, round(2 ** ((bucket + 1) / _PER_OCTAVE)) - tokens))
        return ahead


def _bucket(tokens: int) -> int:
    return int(math.log2(tokens) * _PER_OCTAVE) if tokens > 1 else 0
