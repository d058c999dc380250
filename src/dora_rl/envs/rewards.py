"""Scores completions with the reward functions of a config.

Invariants:
- a name that can't be resolved is the user's mistake and raises when the scorer is made; after that only the user's
  interrupt (KeyboardInterrupt) raises: any other error of a function becomes a failure that names the function;
- a reward result has either a finite reward or the reason of a failure, never both and never neither;
- the result of an answer does not depend on the other answers of the call: if a function that takes many answers fails
  on all of them together, it is called again for each.

A scorer runs in a process that may be killed: the supervisor ends a function that hangs.
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
from dora_rl.envs.reward_notes import MOST, Note, Notes, clean
from dora_rl.envs.reward_signatures import Answer, RewardSignature, signature_of
from dora_rl.envs.user_code import named_object, one_line


class RewardResult(Record, frozen=True, kw_only=True):
    """The reward of one answer, or why it could not be computed."""

    reward: float | None = None
    components: dict[str, float] = msgspec.field(default_factory=dict)
    """The score of each function before weighting; further numbers that it returned or logged, as `function/name`."""
    notes: dict[str, Note] = msgspec.field(default_factory=dict)
    """Further values that the functions logged about this answer, as `function/name`."""
    failed: str | None = None

    def __post_init__(self) -> None:
        assert (self.reward is None) != (self.failed is None)
        assert self.reward is None or math.isfinite(self.reward)


_LARGEST = 1e300
"""Larger numbers are left out, so that the sums over a step stay finite."""


class _Score(Record, frozen=True, kw_only=True):
    """The score that one function gives one answer; neither value nor failure if the function does not apply."""

    value: float | None = None
    extras: dict[str, float] = msgspec.field(default_factory=dict)
    notes: dict[str, Note] = msgspec.field(default_factory=dict)
    failed: str | None = None


_Scores: TypeAlias = list[_Score]


class RewardScorer:
    """All reward functions of a run, each called according to its signature."""

    def __init__(self, reward: RewardConfig, folder: Path) -> None:
        self._functions = _resolve(reward, folder)
        self._weights = reward.weights or [1.0] * len(self._functions)
        self._loop = Loop() if reward.concurrency == 1 else SharedLoop()

    def score(self, problem: Problem, completion: str, completion_ids: tuple[int, ...] = ()) -> RewardResult:
        """Score one completion."""
        return self.score_many([Answer(problem, completion, completion_ids)])[0]

    def score_many(self, answers: Sequence[Answer]) -> list[RewardResult]:
        """Score many answers, in their order; functions that take lists are called once."""
        table = [self._by_function(function, answers) for function in self._functions]
        return [self._combine([scores[index] for scores in table]) for index in range(len(answers))]

    def _by_function(self, function: RewardSignature, answers: Sequence[Answer]) -> _Scores:
        if function.many is not None and len(answers) > 1:
            together = self._together(function, answers)
            if together is not None:
                return together
        return [self._alone(function, answer) for answer in answers]

    def _together(self, function: RewardSignature, answers: Sequence[Answer]) -> _Scores | None:
        """All scores of one call; None if the call failed as a whole."""
        assert function.many is not None
        notes = Notes(len(answers))
        try:
            values = list(self._loop.finish(function.many(answers, notes)))
        except KeyboardInterrupt:
            raise
        except BaseException:
            return None
        if len(values) != len(answers):
            return None
        scores = [_score(function.name, value, listed=True) for value in values]
        return [_annotated(score, notes, index) for index, score in enumerate(scores)]

    def _alone(self, function: RewardSignature, answer: Answer) -> _Score:
        notes = Notes(1)
        try:
            value = self._loop.finish(function.one(answer, notes))
            if function.many is None:
                return _score(function.name, value, listed=False)
            values = list(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return _Score(failed=f"{function.name}: {one_line(error)}")
        if len(values) != 1:
            return _Score(failed=f"{function.name} returned {len(values)} scores for 1 completion")
        return _annotated(_score(function.name, values[0], listed=True), notes, 0)

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
        notes = {
            f"{function.name}/{name}": value for function, _, score in named for name, value in score.notes.items()
        }
        components = {**extras, **{name: value for name, _, value in applying}}
        return RewardResult(reward=reward, components=components, notes=notes)


def _annotated(score: _Score, notes: Notes, index: int) -> _Score:
    """A score with what its function logged; a number that it returned comes before one that it logged."""
    return msgspec.structs.replace(score, extras={**notes.metrics, **score.extras}, notes=notes.about(index))


def _score(name: str, value: Any, *, listed: bool) -> _Score:
    """The score in a returned value. In a list, None means that the function does not apply to that row, as in TRL."""
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


def _extras(returned: dict[Any, Any]) -> dict[str, float]:
    """The numbers beside the score, of any numeric type; other values are left out."""
    found: dict[str, float] = {}
    for key, item in returned.items():
        if key == "score" or len(found) == MOST or not hasattr(item, "__float__"):
            continue
        with contextlib.suppress(Exception):  # for instance an array
            number = float(item)
            if abs(number) < _LARGEST:  # False for NaN, too
                found[clean(key)] = number
    return found


def _resolve(reward: RewardConfig, folder: Path) -> list[RewardSignature]:
    """All functions, under their short names where those are unique."""
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
        raise ConfigError(f"reward '{name}' is unknown: use {', '.join(NAMES)}, format:REGEX or FILE.py:function")
    return signature_of(name.rpartition(":")[2], named_object(name, folder))
