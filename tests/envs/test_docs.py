"""The examples in docs/tasks.md and in examples/ work as described."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_rl.core.config import Config, build
from dora_rl.envs.config import DataConfig, EnvironmentConfig, RewardConfig
from dora_rl.envs.data import load
from dora_rl.envs.environment import Environments
from dora_rl.envs.rewards import RewardScorer
from dora_rl.envs.sandbox.sandbox import GUARANTEES, Sandbox, SandboxLimits
from tests.envs.making import CHAT, a_problem, loaded, scorer, write_code

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "tasks.md").read_text()
confined = pytest.mark.skipif(Sandbox.guarantees() != GUARANTEES, reason="this system can't confine code")


class Task(Config):
    data: DataConfig = DataConfig(source="rows.jsonl")
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def task() -> Task:
    tree: dict[str, Any] = {}
    for block in blocks("toml"):
        tree |= tomllib.loads(block)
    return build(Task, tree)


def test_the_rows_on_the_page_are_problems(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(blocks("jsonl")[0])
    dataset = load(task().data, tmp_path)
    assert [problem.answer for problem in dataset.train] == ["42", "4"]
    assert [problem.answer for problem in dataset.held_out] == ["-2"]


def test_the_rewards_on_the_page_are_scored() -> None:
    made = RewardScorer(task().reward, EXAMPLES)
    components = made.score(a_problem(), "<think>6 x 7</think> 42").components
    assert components["number"] == components["format:^<think>.*</think>"] == 1.0
    assert 0.5 < components["short_and_right"] < 1.0


@pytest.mark.parametrize("name", ["trl_style", "compute_score", "plain"])
def test_the_signatures_on_the_page_work(name: str, tmp_path: Path) -> None:
    write_code(tmp_path, blocks("python")[0])
    made = scorer(tmp_path, f"task.py:{name}")
    assert [made.score(a_problem(), text).reward for text in ("42", "41")] == [1.0, 0.0]


def test_the_function_that_logs_on_the_page_works(tmp_path: Path) -> None:
    write_code(tmp_path, blocks("python")[1])
    result = scorer(tmp_path, "task.py:correct").score(a_problem(), "6 * 7 = 42".replace(" ", ""))
    assert (result.reward, result.notes) == (1.0, {"correct/found": "42"})
    assert result.components["correct/empty"] == 0.0


@confined
def test_the_rows_with_tests_on_the_page_are_scored(tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text(blocks("jsonl")[1])
    program, function = loaded(tmp_path, "code.jsonl").train
    made = scorer(tmp_path, "code")
    assert made.score(program, "```python\nprint(sum(map(int, input().split())))\n```").reward == 1.0
    assert made.score(function, "```python\ndef add(a, b): return 3\n```").reward == 0.5


def test_the_environment_on_the_page_is_played() -> None:
    game = Environments(task().environment, EXAMPLES).begin(a_problem(secret=6))
    assert [game.step(text).observation for text in ("4", "6")] == ["Higher.", None]
    assert game.result().reward == 1.0


@confined
def test_the_sandbox_on_the_page_runs() -> None:
    exec(blocks("python")[2], {})
    limits = SandboxLimits()
    defaults = (limits.wall_seconds, limits.cpu_seconds, limits.memory_bytes, limits.disk_bytes, limits.disk_entries)
    assert defaults == (10, 10, 512 << 20, 32 << 20, 1000)
    assert (limits.output_bytes, limits.threads) == (1 << 20, 32)


def test_every_guarantee_and_builtin_is_on_the_page() -> None:
    from dora_rl.envs.builtins import NAMES

    named = set(re.findall(r"^\| `(\w+)", PAGE, re.MULTILINE))
    assert named >= GUARANTEES | set(NAMES)


def test_the_example_rewards() -> None:
    brief = scorer(EXAMPLES, "rewards/brevity.py:short_and_right")
    texts = ["42", "It is 42, of course, as everybody knows.", "41"]
    rewards = [brief.score(a_problem(prompt=CHAT), text).reward for text in texts]
    assert rewards == sorted((reward for reward in rewards if reward is not None), reverse=True)
    assert rewards[2] == 0.0
    digits = scorer(EXAMPLES, "rewards/digits.py:compute_score", "rewards/digits.py:ends_with_answer")
    result = digits.score(a_problem(), "It is 43")
    assert result.components == {"compute_score": 0.5, "compute_score/exact": 0.0, "ends_with_answer": 0.0}
    assert digits.score(a_problem(), "It is 42.").components["ends_with_answer"] == 1.0
    assert msgspec.json.encode(result)
