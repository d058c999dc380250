"""The reward of code is the share of its row's tests that it passes, however it behaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.envs.code_reward import last_block
from dora_rl.envs.sandbox.sandbox import GUARANTEES, Sandbox
from tests.envs.making import a_problem, scorer

pytestmark = pytest.mark.skipif(Sandbox.guarantees() != GUARANTEES, reason="this system can't confine code")

PAIRS = [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "4\n"}]
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


def reward(tests: Any, block: str, **settings: Any) -> float | None:
    made = scorer(Path(), "code", **settings)
    return made.score(a_problem(tests=tests), f"Like this:\n```python\n{block}\n```\nDone.").reward


@pytest.mark.parametrize(
    ("block", "share"),
    [
        ("print(sum(map(int, input().split())))", 1.0),
        ("print(3)", 0.5),
        ("print(' 3 ')", 0.0),
        ("import sys; print(3); sys.exit(1)", 0.0),
        ("open('/etc/passwd'); print(3)", 0.0),
        ("def f(:", 0.0),
    ],
)
def test_programs_are_scored_by_their_output(block: str, share: float) -> None:
    assert reward(PAIRS, block) == share


@pytest.mark.parametrize(
    ("block", "share"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return 3", 0.5),
        ("import os\nos._exit(0)", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("def add(a, b): raise SystemExit", 0.0),
        ("print('x', end='')\ndef add(a, b): return a + b", 1.0),
    ],
)
def test_functions_are_scored_by_asserts(block: str, share: float) -> None:
    assert reward(ASSERTS, block) == share
    assert reward("\n".join(ASSERTS), block) == (1.0 if share == 1.0 else 0.0)


def test_code_that_never_ends_scores_the_tests_that_it_passed() -> None:
    block = "n = sum(map(int, input().split()))\nwhile n == 4: time.sleep(1)\nprint(n)"
    assert reward(PAIRS * 5, "import time\n" + block, timeout_seconds=10.0) == 0.1


def test_lists_of_inputs_and_outputs_are_read_too() -> None:
    assert reward({"inputs": ["1 2\n"], "outputs": ["3"]}, "print(3)") == 1.0


@pytest.mark.parametrize("tests", [None, [], "", [{"input": "1"}], [3], {"inputs": ["1"], "outputs": []}])
def test_a_row_without_tests_fails(tests: Any) -> None:
    failed = scorer(Path(), "code").score(a_problem(tests=tests), "```\n1\n```").failed
    assert failed is not None
    assert failed.startswith("code: ValueError")


def test_the_last_block_of_python_counts() -> None:
    assert last_block("```python\na\n```\n```py\nb\n```\n```json\n{}\n```") == "b\n"
    assert last_block("```\na\n```") == "a\n"
    assert last_block("no block") is None
    assert scorer(Path(), "code").score(a_problem(tests=ASSERTS), "no block").reward == 0.0
