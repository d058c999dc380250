"""Trajectories of several turns: an environment answers each message of the policy until it is done.

A `Session` is the environment of one trajectory, from reset to reward result. Invariants:
- a class that can't be used is the user's mistake and raises when `Environments` is made; after that only the user's
  interrupt (KeyboardInterrupt) raises: a session whose environment raises or returns nonsense ends with a failure;
- a session takes at most `max_turns` texts and ends once: after `done` it takes no more;
- its reward is the sum of the rewards of its steps, plus that of the reward functions, if any, for the last text.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from dora_rl.core.errors import ConfigError
from dora_rl.core.types import Record
from dora_rl.envs.async_bridge import Loop, SharedLoop
from dora_rl.envs.config import EnvironmentConfig
from dora_rl.envs.data import ChatMessage, Problem
from dora_rl.envs.reward_signatures import copy_of
from dora_rl.envs.rewards import RewardResult, RewardScorer
from dora_rl.envs.user_code import named_object, one_line

Opening: TypeAlias = str | tuple[ChatMessage, ...] | None


class Turn(Record, frozen=True, kw_only=True):
    """The answer of an environment to one message of the policy."""

    observation: str | None = None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """The interface of a user's environment; both methods may be async. One object serves one trajectory."""

    def reset(self, problem: Problem) -> Any:
        """Start with a problem; the returned text or messages, if any, are put after the prompt."""

    def step(self, text: str) -> Any:
        """Answer the policy with a `Turn`, with `(observation, reward, done)`, or as gym's environments do."""


class Environments:
    """Makes one environment for each trajectory, from the class that the config names."""

    def __init__(self, config: EnvironmentConfig, folder: Path, scorer: RewardScorer | None = None) -> None:
        if config.kind is None:
            raise ConfigError("environment.kind is missing: name a class as FILE.py:Class or module:Class")
        self._make: Callable[..., Environment] = named_object(config.kind, folder)
        self._config = config
        self._scorer = scorer
        self._loop = Loop() if config.concurrency == 1 else SharedLoop()
        _check(config.kind, self._make, config.params)

    def begin(self, problem: Problem) -> Session:
        """A new environment that was reset to a problem."""
        return Session(
            lambda: self._make(**self._config.params), problem, self._config.max_turns, self._loop, self._scorer
        )


class Session:
    """The environment of one trajectory."""

    def __init__(
        self,
        make: Callable[[], Environment],
        problem: Problem,
        max_turns: int,
        loop: Loop | SharedLoop,
        scorer: RewardScorer | None,
    ) -> None:
        self._problem = problem
        self._max_turns = max_turns
        self._loop = loop
        self._scorer = scorer
        self._last: tuple[str, tuple[int, ...]] | None = None
        self._rewards: list[float] = []
        self._observation: str | None = None
        self._ended = False
        self._environment: Environment | None = None
        self.turns = 0
        self.failed: str | None = None
        self.opening: Opening = None
        """The text or messages that the environment puts after the prompt."""
        self._guarded("reset", lambda: self._begin(make))

    @property
    def done(self) -> bool:
        """There are no more turns: the environment is done, the turns are used up, or it failed."""
        return self._ended or self.failed is not None or self.turns >= self._max_turns

    def step(self, text: str, token_ids: tuple[int, ...] = ()) -> Turn:
        """Pass the policy's text to the environment. A turn that fails, or is the last one allowed, is done."""
        assert not self.done, "the session is over"
        self.turns += 1
        self._last = text, token_ids
        self._guarded("step", lambda: self._take(text))
        observation = None if self.done else self._observation
        reward = self._rewards[-1] if self.failed is None else 0.0
        return Turn(observation=observation, reward=reward, done=self.done)

    def result(self) -> RewardResult:
        """Close the environment and return the reward of the trajectory, or why it failed."""
        self.close()
        if self.failed is not None:
            return RewardResult(failed=self.failed)
        steps = math.fsum(self._rewards)
        scored = RewardResult(reward=0.0)
        if self._scorer is not None and self._last is not None:
            scored = self._scorer.score(self._problem, *self._last)
        if scored.reward is None:
            return scored
        if not math.isfinite(steps + scored.reward):
            return RewardResult(failed="the sum of the rewards is not finite")
        return RewardResult(
            reward=steps + scored.reward, components={**scored.components, "environment": steps}, notes=scored.notes
        )

    def close(self) -> None:
        """Call the environment's `close`, if it has one; an error there fails the session too."""
        environment, self._environment = self._environment, None
        closing = getattr(environment, "close", None)
        if callable(closing):
            self._guarded("close", lambda: self._loop.finish(closing()))

    def _begin(self, make: Callable[[], Environment]) -> None:
        self._environment = make()
        self.opening = _opening(self._loop.finish(self._environment.reset(copy_of(self._problem))))

    def _take(self, text: str) -> None:
        assert self._environment is not None
        turn = as_turn(self._loop.finish(self._environment.step(text)))
        self._rewards.append(turn.reward)
        self._observation = turn.observation
        self._ended = turn.done

    def _guarded(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.failed = self.failed or f"environment, {what}: {one_line(error)}"


def as_turn(value: Any) -> Turn:
    """The turn that a step returned, in any of the usual forms."""
    if isinstance(value, Turn):
        observation, reward, done = value.observation, value.reward, value.done
    elif not isinstance(value, tuple) or len(value) not in (3, 4, 5):
        raise TypeError(f"returned {type(value).__name__}, not a Turn or (observation, reward, done)")
    elif len(value) == 5:  # gym since 0.26: terminated, truncated, info
        observation, reward, done = value[0], value[1], bool(value[2]) or bool(value[3])
    else:
        observation, reward, done = value[:3]
    if observation is not None and not isinstance(observation, str):
        raise TypeError(f"the observation is {type(observation).__name__}, not a text")
    if isinstance(reward, str | bytes) or not math.isfinite(float(reward)):
        raise ValueError(f"the reward is {reward!r}")
    if observation is None and not done:
        raise ValueError("there is no observation, but the environment is not done")
    return Turn(observation=observation, reward=float(reward), done=bool(done))


def _opening(value: Any) -> Opening:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]  # gym: observation, info
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        return tuple(item if isinstance(item, ChatMessage) else msgspec.convert(item, ChatMessage) for item in value)
    raise TypeError(f"returned {type(value).__name__}, not a text, messages or None")


def _check(name: str, make: Any, params: dict[str, Any]) -> None:
    missing = [method for method in ("reset", "step") if not callable(getattr(make, method, None))]
    if not callable(make) or (inspect.isclass(make) and missing):
        lacking = missing[0] if missing else "step"
        raise ConfigError(f"environment '{name}' has no method '{lacking}'")
    try:
        inspect.signature(make).bind(**params)
    except TypeError as error:
        raise ConfigError(f"environment '{name}' can't be made with environment.params: {error}") from error
    except ValueError:
        return  # its parameters can't be inspected
