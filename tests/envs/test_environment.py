"""An environment answers until it is done; whatever it does, its session ends with one reward result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.envs.async_bridge import Loop
from dora_rl.envs.config import EnvironmentConfig
from dora_rl.envs.data import ChatMessage
from dora_rl.envs.environment import Environments, Session, Turn, as_turn
from dora_rl.envs.rewards import RewardResult, RewardScorer
from tests.envs.making import a_problem, scorer, write_code

EXAMPLES = Path(__file__).parents[2] / "examples"


def session(
    folder: Path, kind: str, problem: Any = None, scored_by: RewardScorer | None = None, **settings: Any
) -> Session:
    config = build(EnvironmentConfig, {"kind": kind, **settings})
    return Environments(config, folder, scored_by).begin(problem or a_problem())


def written(folder: Path, body: str, **settings: Any) -> Session:
    write_code(folder, f"class E:\n    def reset(self, problem): return None\n    {body}\n")
    return session(folder, "task.py:E", **settings)


@pytest.mark.parametrize("secret", [1, 37, 100])
def test_the_example_can_be_won_by_halving(secret: int) -> None:
    game = session(EXAMPLES, "environments/guess_number.py:GuessNumber", a_problem(secret=secret))
    assert game.opening == "I think of a number from 1 to 100. What is it?"
    low, high = 1, 100
    while not game.done:
        middle = (low + high) // 2
        answer = game.step(f"Is it {middle}?").observation
        low, high = (middle + 1, high) if answer == "Higher." else (low, middle - 1)
    assert game.result() == RewardResult(reward=1.0, components={"environment": 1.0})


def test_turns_are_counted_and_the_last_has_no_observation() -> None:
    game = session(EXAMPLES, "environments/guess_number.py:GuessNumber", a_problem(secret=3), max_turns=2)
    assert game.step("hm") == Turn(observation="Say a number.")
    assert game.step("4") == Turn(done=True)
    assert game.done
    with pytest.raises(AssertionError, match="the session is over"):
        game.step("3")
    assert game.result().reward == 0.0


def test_each_trajectory_has_its_own_environment() -> None:
    config = build(EnvironmentConfig, {"kind": "environments/guess_number.py:GuessNumber", "params": {"highest": 7}})
    games = Environments(config, EXAMPLES)
    one, other = games.begin(a_problem(secret=1)), games.begin(a_problem(secret=2))
    assert one.opening == "I think of a number from 1 to 7. What is it?"
    assert one.step("1").done
    assert other.step("1") == Turn(observation="Higher.")


def test_step_rewards_and_reward_functions_are_added(tmp_path: Path) -> None:
    body = "def step(self, text): return 'more', 0.25, text == '42'"
    functions = scorer(tmp_path, "exact", weights=[2.0])
    game = written(tmp_path, body, scored_by=functions)
    assert [game.step(text).reward for text in ("41", "42")] == [0.25, 0.25]
    assert game.result() == RewardResult(reward=2.5, components={"exact": 1.0, "environment": 0.5})


def test_a_reward_function_that_fails_fails_the_trajectory(tmp_path: Path) -> None:
    game = written(tmp_path, "def step(self, text): return None, 1.0, True", scored_by=scorer(tmp_path, "number"))
    game._problem = a_problem(None)
    game.step("x")
    assert game.result().failed == "number: ValueError: the row has no answer"


@pytest.mark.parametrize(
    ("value", "turn"),
    [
        (Turn(observation="a", reward=1.0), Turn(observation="a", reward=1.0)),
        (("a", 1, False), Turn(observation="a", reward=1.0)),
        (("a", np.float32(0.5), np.bool_(True)), Turn(observation="a", reward=0.5, done=True)),
        ((None, 0, True, {}), Turn(done=True)),
        (("a", 0, False, False, {}), Turn(observation="a")),
        (("a", 0, False, True, {}), Turn(observation="a", done=True)),
        (("a", 0, True, False, {}), Turn(observation="a", done=True)),
    ],
)
def test_steps_may_return_the_usual_forms(value: Any, turn: Turn) -> None:
    assert as_turn(value) == turn


HOSTILE = {
    "raise ValueError('no')": "environment, step: ValueError: no",
    "raise SystemExit": "environment, step: SystemExit",
    "return self.step(text)": "environment, step: RecursionError",
    "return None": "environment, step: TypeError: returned NoneType, not a Turn",
    "return 'a', 1": "environment, step: TypeError: returned tuple",
    "return 3, 1.0, False": "environment, step: TypeError: the observation is int",
    "return 'a', float('nan'), False": "environment, step: ValueError: the reward is nan",
    "return 'a', '1', False": "environment, step: ValueError: the reward is '1'",
    "return 'a', None, False": "environment, step: TypeError",
    "return None, 1.0, False": "environment, step: ValueError: there is no observation",
}


@pytest.mark.parametrize("line", HOSTILE)
def test_a_step_that_raises_or_returns_nonsense_fails(line: str, tmp_path: Path) -> None:
    game = written(tmp_path, f"def step(self, text): {line}")
    assert game.step("x") == Turn(done=True)
    failed = game.result().failed
    assert failed is not None
    assert failed.startswith(HOSTILE[line])


@pytest.mark.parametrize("body", ["def __init__(self): 1 / 0", "def reset(self, problem): 1 / 0"])
def test_an_environment_that_cannot_be_reset_fails(body: str, tmp_path: Path) -> None:
    game = written(tmp_path, f"def step(self, text): pass\n    {body}")
    assert game.done
    assert game.result().failed == "environment, reset: ZeroDivisionError: division by zero"


def test_environments_are_closed_once_and_an_error_in_close_fails(tmp_path: Path) -> None:
    body = "def step(self, text): return None, 1.0, True\n    def close(self): raise OSError('stuck')"
    game = written(tmp_path, body)
    game.step("x")
    assert game.result().failed == "environment, close: OSError: stuck"


def test_async_environments_are_awaited(tmp_path: Path) -> None:
    write_code(tmp_path, """
import asyncio
class E:
    async def reset(self, problem):
        self.queue = asyncio.Queue()
        return [{"role": "system", "content": "Play."}, {"role": "user", "content": problem.prompt}]
    async def step(self, text):
        await self.queue.put(text)
        return await self.queue.get(), 1.0, True
""")  # fmt: skip
    game = session(tmp_path, "task.py:E")
    assert game.opening == (
        ChatMessage(role="system", content="Play."),
        ChatMessage(role="user", content="What is 6 x 7?"),
    )
    game.step("x")
    assert game.result().reward == 1.0


def test_changes_to_a_problem_are_not_seen_by_other_environments(tmp_path: Path) -> None:
    write_code(tmp_path, """
class E:
    def reset(self, problem): return problem.columns["info"].pop()
    def step(self, text): return None, 0.0, True
""")  # fmt: skip
    problem = a_problem(info=["a"])
    assert [session(tmp_path, "task.py:E", problem).opening for _ in range(2)] == ["a", "a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "environment.kind is missing"),
        ({"kind": "task.py:Absent"}, "has no 'Absent'"),
        ({"kind": "task.py:Half"}, "has no method 'step'"),
        ({"kind": "task.py:number"}, "has no method"),
        ({"kind": "task.py:Whole", "params": {"hihgest": 3}}, "unexpected keyword argument 'hihgest'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_at_once(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    half = "number = 3\nclass Half:\n    def reset(self, problem): pass\n"
    write_code(tmp_path, half + "class Whole(Half):\n    def __init__(self): pass\n    def step(self, text): pass\n")
    with pytest.raises(ConfigError, match=message):
        Environments(build(EnvironmentConfig, settings), tmp_path)


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none(), max_size=2)
)


@given(value=anything | st.tuples(anything, anything, anything) | st.lists(anything, max_size=6).map(tuple))
def test_any_returned_value_ends_in_one_result(value: Any) -> None:
    class E:
        def reset(self, problem: Any) -> Any:
            return value

        def step(self, text: str) -> Any:
            return value

    games = Environments.__new__(Environments)
    games._make, games._config, games._scorer = E, EnvironmentConfig(max_turns=2), None
    games._loop = Loop()
    game = games.begin(a_problem())
    while not game.done:
        game.step("x")
    result = game.result()
    assert (result.reward is None) != (result.failed is None)
