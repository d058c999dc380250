"""The reward `code`: runs the last fenced block of a completion in the sandbox against the tests of its row.

The row's column `tests` is either a list of `{"input": ..., "output": ...}` pairs, for programs that read stdin and
write stdout, or Python code with asserts (one text or a list of texts), which runs after the block. The reward is the
share of tests that pass.

Invariants:
- the tests of a completion share one time budget, which is below `reward.timeout_seconds`: code that never ends scores
  the tests that it passed before the budget ran out, and is not a failure;
- a block that exits before the asserts, with any exit code, has not passed them. The block and the asserts share a
  process, however, so a block written to deceive the asserts can do so; outputs are compared outside that process.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from dora_rl.envs.data import Problem
from dora_rl.envs.sandbox.sandbox import Sandbox, SandboxLimits

_TEST_SECONDS = 10.0
_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)


def last_block(text: str) -> str | None:
    """The last fenced block that is marked as Python or has no language."""
    found = [body for language, body in _BLOCK.findall(text) if language.lower() in ("", "py", "python", "python3")]
    return found[-1] if found else None


class CodeReward:
    """Runs the code of completions, each within a time budget in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        Sandbox()  # raises at once where code can't be run safely

    def __call__(self, problem: Problem, completion: str) -> float:
        """The share of the row's tests that the code of the completion passes."""
        tests = _tests(problem.columns.get("tests"))
        block = last_block(completion)
        if block is None:
            return 0.0
        deadline = time.monotonic() + self._seconds
        passed = 0
        for test in tests:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            passed += _passes(block, test, Sandbox(SandboxLimits(wall_seconds=min(left, _TEST_SECONDS))))
        return passed / len(tests)


def _passes(block: str, test: str | tuple[str, str], sandbox: Sandbox) -> bool:
    if isinstance(test, str):
        return _asserts(block, test, sandbox)
    given, wanted = test
    outcome = sandbox.run(block, stdin=given)
    return outcome.ok and _lines(outcome.stdout) == _lines(wanted)


def _asserts(block: str, test: str, sandbox: Sandbox) -> bool:
    """Whether the code after the asserts is reached: it prints a word made for this run."""
    word = secrets.token_hex(16)
    outcome = sandbox.run(f"{block}\n{test}\nprint()\nprint({word!r})\n")
    return outcome.ok and outcome.stdout.endswith(f"\n{word}\n")


def _tests(column: Any) -> list[str | tuple[str, str]]:
    listed = column if isinstance(column, list) else [column]
    if isinstance(column, dict) and isinstance(column.get("inputs"), list):
        listed = [
            {"input": given, "output": wanted}
            for given, wanted in zip(column["inputs"], column.get("outputs", []), strict=True)
        ]
    tests = [_test(each) for each in listed]
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _test(each: Any) -> str | tuple[str, str]:
    if isinstance(each, str) and each.strip():
        return each
    if isinstance(each, dict) and isinstance(each.get("input"), str) and isinstance(each.get("output"), str):
        return each["input"], each["output"]
    raise ValueError("the row's 'tests' must be asserts as text, or a list of objects with input and output")


def _lines(text: str) -> list[str]:
    """The lines of an output that are compared: without trailing spaces and without trailing empty lines."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
