"""Judging: completions in, verdicts out.

Invariants:
- a name that can't be resolved is the user's mistake and raises when the judge is made; from then on nothing raises
  but the user's own interrupt: whatever a function does becomes a `failed` verdict that names it;
- a verdict has either a finite reward or a reason, never both and never neither;
- an answer's verdict does not depend on the answers that are judged beside it: where a function that takes many fails
  on them together, each is given to it alone.

A judge runs in a process that may be killed: a function that hangs is cut off from outside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dora_rl.core.errors import ConfigError
from dora_rl.core.types import Record
from dora_rl.envs.async_bridge import Loop, SharedLoop
from dora_rl.envs.builtins import NAMES, builtin
from dora_rl.envs.config import RewardConfig
from dora_rl.envs.data import Problem
from dora_rl.envs.reward_signatures import Answer, RewardSignature, signature_of
from dora_rl.envs.user_code import named_object, one_line


class RewardResult(Record, frozen=True, kw_only=True):
    """What one answer is worth, or why nobody can say."""

    reward: float | None = None
    components: dict[str, float] = msgspec.field(default_factory=dict)
    """What each function gave, before weights; further numbers it told of, as `function/name`."""
    failed: str | None = None

    def __post_init__(self) -> None:
        assert (self.reward is None) != (self.failed is None)
        assert self.reward is None or math.isfinite(self.reward)


_MOST_EXTRAS = 32
"""Further numbers of one verdict that are kept: each becomes a metric, and is written down with its trajectory."""
_LARGEST = 1e300
"""Sums of a step's numbers are finite."""


class _Score(Record, frozen=True, kw_only=True):
    """What one function says of one answer; neither value nor failure where it does not apply."""

    value: float | None = None
    extras: dict[str, float] = msgspec.field(default_factory=dict)
    failed: str | None = None


_Scores: TypeAlias = list[_Score]


class RewardScorer:
    """All reward functions of a run, called as their shapes want it."""

    def __init__(self, reward: RewardConfig, folder: Path) -> None:
        self._functions = _resolve(reward, folder)
        self._weights = reward.weights or [1.0] * len(self._functions)
        self._loop = Loop() if reward.concurrency == 1 else SharedLoop()

    def score(self, problem: Problem, completion: str, completion_ids: tuple[int, ...] = ()) -> RewardResult:
        """The verdict on one completion."""
        return self.score_many([Answer(problem, completion, completion_ids)])[0]

    def score_many(self, answers: Sequence[Answer]) -> list[RewardResult]:
        """The verdicts on many, in their order; functions that take lists are called once."""
        table = [self._by_function(function, answers) for function in self._functions]
        return [self._combine([scores[place] for scores in table]) for place in range(len(answers))]

    def _by_function(self, function: RewardSignature, answers: Sequence[Answer]) -> _Scores:
        if function.many is not None and len(answers) > 1:
            together = self._together(function, answers)
            if together is not None:
                return together
        return [self._alone(function, answer) for answer in answers]

    def _together(self, function: RewardSignature, answers: Sequence[Answer]) -> _Scores | None:
        """All scores of one call; none if the call as a whole came to nothing."""
        assert function.many is not None
        try:
            values = list(self._loop.finish(function.many(answers)))
        except KeyboardInterrupt:
            raise
        except BaseException:
            return None
        if len(values) != len(answers):
            return None
        return [_score(function.name, value, listed=True) for value in values]

    def _alone(self, function: RewardSignature, answer: Answer) -> _Score:
        try:
            value = self._loop.finish(function.one(answer))
            if function.many is None:
                return _score(function.name, value, listed=False)
            values = list(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return _Score(failed=f"{function.name}: {one_line(error)}")
        if len(values) != 1:
            return _Score(failed=f"{function.name} returned {len(values)} scores for 1 completion")
        return _score(function.name, values[0], listed=True)

    def _combine(self, scores: _Scores) -> RewardResult:
        failures = [score.failed for score in scores if score.failed is not None]
        if failures:
            return RewardResult(failed=failures[0])
        named = list(zip(self._functions, self._weights, scores, strict=True))
        applying = [
            (function.name, weight, score.value) for function, weight, score in named if score.value is not None
        ]
        if scores and not applying:
            return RewardResult(failed=f"{self._functions[0].name} returned None")
        reward = sum(weight * value for _, weight, value in applying)
        if not math.isfinite(reward):
            return RewardResult(failed=f"the weighted sum of the rewards is {reward}")
        extras = {
            f"{function.name}/{name}": value for function, _, score in named for name, value in score.extras.items()
        }
        return RewardResult(reward=reward, components={**extras, **{name: value for name, _, value in applying}})


def _score(name: str, value: Any, *, listed: bool) -> _Score:
    """Read one returned value. In a list, None says that the function does not apply to that row, as in TRL."""
    try:
        if value is None and listed:
            return _Score()
        extras: dict[str, float] = {}
        if isinstance(value, dict):
            if "score" not in value:
                return _Score(failed=f"{name} returned a dict without 'score'")
            extras = _extras(value)
            value = value["score"]
        if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            return _Score(failed=f"{name} returned {type(value).__name__}, not a number")
        number = float(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _Score(failed=f"{name}: {one_line(error)}")
    if not math.isfinite(number):
        return _Score(failed=f"{name} returned {number}")
    return _Score(value=number, extras=extras)


def _text(key: Any) -> str:
    return str(key).encode("utf-8", "replace").decode()


def _extras(returned: dict[Any, Any]) -> dict[str, float]:
    """The numbers beside the score, whatever kind of number they are; what is none is left out."""
    found: dict[str, float] = {}
    for key, item in returned.items():
        if key == "score" or len(found) == _MOST_EXTRAS or not hasattr(item, "__float__"):
            continue
        with contextlib.suppress(Exception):  # an array, say
            number = float(item)
            if abs(number) < _LARGEST:  # and not what is not finite
                found[_text(key)] = number
    return found


def _resolve(reward: RewardConfig, folder: Path) -> list[RewardSignature]:
    """All functions, under short names where those differ."""
    found = [_function(name, folder, reward.timeout_seconds) for name in reward.functions]
    short = [function.name for function in found]
    return [
        function if short.count(function.name) == 1 else function._replace(name=name)
        for name, function in zip(reward.functions, found, strict=True)
    ]


def _function(name: str, folder: Path, seconds: float) -> RewardSignature:
    ready = builtin(name, seconds)
    if ready is not None:
        return signature_of(name, ready)
    if ":" not in name:
        raise ConfigError(f"reward '{name}' is unknown: take {', '.join(NAMES)}, format:REGEX or FILE.py:function")
    return signature_of(name.rpartition(":")[2], named_object(name, folder))
