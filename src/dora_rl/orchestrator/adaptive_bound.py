"""Chooses the staleness bound K of a run with `control.max_staleness = "auto"`, from what each step measured.

What counts is the rate of effective samples: tokens trained per second, times the effective sample size of the step. A
sample of importance weight w counts less the more the weights differ, so n samples reduce the variance of the gradient
like ESS * n samples of the trained policy. K is worth having if it gives at least `_GAIN` more of that rate than K - 1.

- *Up.* If the trainer waited for rollout for more than `_WAITS` of a window of steps, K + 1 is tried: the bound may
  have kept slots idle, or the step rule may have held finished groups back. A trainer that does not wait gains nothing.
- *Down.* If the trainer waited for less than `_NEVER_WAITS`, K - 1 is tried: the rate can hardly fall, and groups get
  fresher where the bound is what limits admission.
- *A trial* compares a window of steps under the new bound with the window before it. The steps in between are left out:
  groups admitted under the old bound are still trained. It lasts until the difference exceeds its standard error, or
  the window has `_LONGEST` steps. If K was not worth it, or K - 1 was too slow, the trial is undone. Neither the bound
  that lost nor one beyond it is tried for `_FIRST_PAUSE` steps, and for twice as long each time that it loses again.
- *Alarm.* K is halved at once if the effective sample size of one step is below `_LOW_ESS` of what is healthy, or if
  the KL divergence jumps. Half, not one less: a learner that diverges does so within a few steps. A second alarm has to
  wait until the groups that were admitted under the larger bound are trained, since those say nothing about the smaller
  one. The bound with the alarm has lost as in a trial.
- *Healthy* is the mean effective sample size under the least bound, where staleness can do the least harm; as long as
  that is not known, the largest mean of a window so far. It is relative, because the level depends on the task: weights
  of whole responses vary more than weights of tokens.
- *Without an effective sample size* it is estimated as exp(-2 * KL): if log-ratios are normal with variance v, the KL
  divergence is v / 2 and the effective sample size exp(-v).

A bound that no group uses costs nothing, so it is not lowered for that alone.

Invariants:
- FLOOR <= K <= cap, and a step changes K by one, except for an alarm, which halves it;
- two trials, and two alarms, never overlap: a window contains only steps of one bound that have settled;
- the decision is a function of the steps observed: no clock, no randomness.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

FLOOR = 1
"""The least bound, with which a run starts. Under K = 0 rollout and training alternate, which costs more than staleness
1; if one step makes samples useless, the learning rate is too high, and no bound would help."""
DEFAULT_CAP = 8
"""The largest bound that `dora-rl plan` considers."""

_WINDOW = 10
"""Steps that a decision needs. In simulations of a small cluster the rates of single steps differ by 15%, their means
over a window by 5%, and one more K gives 10%."""
_LONGEST = 30
"""Steps that a decision is based on at the most; earlier ones are forgotten."""
_WAITS = 0.05
"""Share of the time that the trainer waits, from which more staleness may be worth it."""
_NEVER_WAITS = 0.01
_GAIN = 0.02
"""A bound that is one larger has to give this much more: less would not show within the longest window."""
_LOW_ESS = 0.5
"""Share of the healthy effective sample size below which there is an alarm: twice the samples for the same gradient
cost more than any bound gains."""
_GOOD_ESS = 0.7
"""Share of the healthy effective sample size that a larger bound requires: clearly above the alarm."""
_KL_JUMP = 3.0
"""Times its mean over the window that the KL divergence of one step must reach for an alarm."""
_KL_NOISE = 0.01
"""No smaller KL divergence per token is a jump: the effective sample size would still be 98%."""
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 256
"""Steps between trials at the most, so that the bound follows a run whose lengths change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasures:
    """What one step measured."""

    seconds: float
    """From the version before to the version of the step."""
    waited: float
    """Seconds of these in which the trainer waited for rollout."""
    tokens: int
    """Response tokens trained."""
    ess: float | None = None
    """Effective sample size divided by the number of samples, in (0, 1]."""
    kl: float | None = None
    """KL divergence per token between the policy that sampled and the one that is trained."""

    @property
    def quality(self) -> float:
        """The effective sample size, estimated if it was not measured."""
        if self.ess is not None:
            return self.ess
        return 1.0 if self.kl is None else math.exp(-2 * max(0.0, self.kl))


@dataclass(frozen=True, slots=True)
class _Rate:
    """Effective samples per second over some steps, and the variance of that mean."""

    mean: float
    variance: float

    @classmethod
    def of(cls, steps: Collection[StepMeasures]) -> _Rate:
        rates = [step.quality * step.tokens / max(step.seconds, 1e-9) for step in steps]
        mean = statistics.fmean(rates, [max(step.seconds, 1e-9) for step in steps])
        return cls(mean, statistics.variance(rates) / len(rates))


@dataclass(slots=True)
class _Direction:
    """Larger or smaller bounds: what they lost with, and for how many steps that is not tried again."""

    sign: int
    pause: int = 0
    """Steps until it may be tried where it lost."""
    next_pause: int = _FIRST_PAUSE
    """Steps of the pause after it loses the next time."""
    lost_at: int | None = None
    """The bound with which it lost last."""

    def may_try(self, bound: int) -> bool:
        return not self.pause or self.lost_at is None or self.sign * (bound - self.lost_at) < 0

    def lose(self, bound: int) -> None:
        self.pause, self.lost_at = self.next_pause, bound
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)

    def win(self, bound: int) -> None:
        """Pauses are short again once the direction wins where it lost before, or beyond."""
        if self.lost_at is not None and self.sign * (bound - self.lost_at) >= 0:
            self.next_pause, self.lost_at = _FIRST_PAUSE, None


@dataclass(frozen=True, slots=True)
class _Trial:
    """The bound and the rate before the bound in force."""

    bound: int
    rate: _Rate


class AdaptiveBound:
    """The bound of one run."""

    def __init__(self, bound: int, cap: int) -> None:
        assert cap >= FLOOR, f"a cap of {cap} is below the least bound"
        self.cap = cap
        self.bound = min(max(bound, FLOOR), cap)
        """K, from the next step on."""
        self._window: deque[StepMeasures] = deque(maxlen=_LONGEST)
        self._settling = self.bound + 1
        """Steps that are left out before the window begins."""
        self._drains = False
        """The steps that are left out may contain groups of a larger bound."""
        self._trial: _Trial | None = None
        self._healthy: float | None = None
        self._up, self._down = _Direction(1), _Direction(-1)

    def observe(self, step: StepMeasures) -> int | None:
        """Take in a step; return the new bound if it changes."""
        before = self.bound
        for direction in (self._up, self._down):
            direction.pause = max(0, direction.pause - 1)
        if self._alarming(step):
            self._up.lose(self.bound)
            self._change(max(FLOOR, self.bound // 2))
        elif self._settling:
            self._settling -= 1
        else:
            self._window.append(step)
            if len(self._window) >= _WINDOW:
                self._decide()
        self._check()
        return None if self.bound == before else self.bound

    def interrupt(self) -> None:
        """Something else has changed the pace, such as a lost process: begin the window again."""
        self._window.clear()
        self._settling = max(self._settling, self.bound + 1)

    def _alarming(self, step: StepMeasures) -> bool:
        if self.bound == FLOOR or (self._settling and self._drains):
            return False
        low = self._healthy is not None and not step.quality >= _LOW_ESS * self._healthy  # also if it is not a number
        if step.kl is None or len(self._window) < _WINDOW // 2:
            return low
        usual = sum(one.kl or 0.0 for one in self._window) / len(self._window)
        return low or step.kl > max(_KL_NOISE, _KL_JUMP * usual)

    def _decide(self) -> None:
        """The window is large enough, and all its steps belong to the bound in force."""
        quality = statistics.fmean(one.quality for one in self._window)
        waited = sum(one.waited for one in self._window) / max(1e-9, sum(one.seconds for one in self._window))
        known = self._healthy if self._healthy is not None and self.bound > FLOOR else quality
        self._healthy = max(known, quality)
        if self._trial is not None:
            self._compare(self._trial)
        elif waited > _WAITS and quality >= _GOOD_ESS * self._healthy:
            if self.bound < self.cap and self._up.may_try(self.bound + 1):
                self._try(self.bound + 1)
        elif waited < _NEVER_WAITS and self.bound > FLOOR and self._down.may_try(self.bound - 1):
            self._try(self.bound - 1)

    def _try(self, bound: int) -> None:
        trial = _Trial(self.bound, _Rate.of(self._window))
        self._change(bound)
        self._trial = trial

    def _compare(self, trial: _Trial) -> None:
        """Keep the larger of the two bounds if it gave more, else the smaller one; or wait for more steps."""
        rate = _Rate.of(self._window)
        larger, smaller = (rate, trial.rate) if self.bound > trial.bound else (trial.rate, rate)
        surplus = larger.mean - (1 + _GAIN) * smaller.mean
        if abs(surplus) < math.sqrt(larger.variance + smaller.variance) and len(self._window) < _LONGEST:
            return
        self._trial = None
        winner, loser = (self._up, self._down) if surplus >= 0 else (self._down, self._up)
        worse, better = sorted((self.bound, trial.bound), reverse=surplus < 0)
        loser.lose(worse)
        if better == self.bound:
            winner.win(better)
        else:
            self._change(better)

    def _change(self, bound: int) -> None:
        """Put another bound in force; groups admitted before are trained within as many steps as their bound."""
        self._drains = bound < self.bound
        self._settling = max(bound, self.bound) + 1
        self.bound = bound
        self._trial = None
        self._window.clear()

    def _check(self) -> None:
        assert FLOOR <= self.bound <= self.cap, f"the bound {self.bound} is not between {FLOOR} and {self.cap}"
        assert not (self._settling and self._window), "a window has begun before the bound has settled"
