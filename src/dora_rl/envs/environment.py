"""Several turns: an environment answers what the policy says, until it is done.

A `Session` is one trajectory's environment, from reset to verdict. Invariants:
- a class that can't be used is the user's mistake and raises when the environment is named; from then on nothing raises
  but the user's own interrupt: an environment that raises or returns nonsense ends its session with a failed verdict;
- a session takes at most `max_turns` texts and ends once: after `done` it takes no more;
- its reward is the sum of what its steps gave, and of the reward functions' sum on the last text if there are any.
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
from dora_rl.envs.reward_signatures import own
from dora_rl.envs.rewards import RewardResult, RewardScorer
from dora_rl.envs.user_code import named_object, one_line

Opening: TypeAlias = str | tuple[ChatMessage, ...] | None


class Turn(Record, frozen=True, kw_only=True):
    """What an environment answers."""

    observation: str | None = None
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """What a user writes; both methods may be async. One object serves one trajectory."""

    def reset(self, problem: Problem) -> Any:
        """Begin with a problem; what it returns (a text, messages or nothing) is put after the prompt."""

    def step(self, text: str) -> Any:
        """Answer the policy: a `Turn`, `(observation, reward, done)`, or what gym's environments return."""


class Environments:
    """The class that a config names, ready to make one environment for each trajectory."""

    def __init__(self, config: EnvironmentConfig, folder: Path, scorer: RewardScorer | None = None) -> None:
        if config.kind is None:
            raise ConfigError("environment.kind is missing: name a class as FILE.py:Class or module:Class")
        self._make: Callable[..., Environment] = named_object(config.kind, folder)
        self._config = config
        self._scorer = scorer
        self._loop = Loop() if config.concurrency == 1 else SharedLoop()
        _check(config.kind, self._make, config.params)

    def begin(self, problem: Problem) -> Session:
        """A new environment, reset to a problem."""
        return Session(
            lambda: self._make(**self._config.params), problem, self._config.max_turns, self._loop, self._scorer
        )


class Session:
    """One trajectory's environment."""

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
        """What the environment puts after the prompt."""
        self._guarded("reset", lambda: self._begin(make))

    @property
    def done(self) -> bool:
        """No more turns: the environment said so, the turns are used up, or it failed."""
        return self._ended or self.failed is not None or self.turns >= self._max_turns

    def step(self, text: str, token_ids: tuple[int, ...] = ()) -> Turn:
        """Give the environment what the policy said. A turn that fails, or is the last one allowed, is done."""
        assert not self.done, "the session is over"
        self.turns += 1
        self._last = text, token_ids
        self._guarded("step", lambda: self._take(text))
        observation = None if self.done else self._observation
        reward = self._rewards[-1] if self.failed is None else 0.0
        return Turn(observation=observation, reward=reward, done=self.done)

    def result(self) -> RewardResult:
        """What the trajectory is worth; closes the environment."""
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
        return RewardResult(reward=steps + scored.reward, components={**scored.components, "environment": steps})

    def close(self) -> None:
        """Let the environment clean up, if it wants to; a failure in that counts too."""
        environment, self._environment = self._environment, None
        closing = getattr(environment, "close", None)
        if callable(closing):
            self._guarded("close", lambda: self._loop.finish(closing()))

    def _begin(self, make: Callable[[], Environment]) -> None:
        self._environment = make()
        self.opening = _opening(self._loop.finish(self._environment.reset(own(self._problem))))

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
    """Read what a step returned, in any of the usual forms."""
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
        raise ValueError("there is no observation, though it is not done")
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
        return  # it says nothing of its parameters
