"""Built-in reward functions, which a config names without any code.

They have the plain signature. Every completion gets a number, whatever it contains; an error means that the row can't
be scored.
"""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, TypeAlias

from dora_rl.core.errors import ConfigError, UserError
from dora_rl.envs.code_reward import CodeReward
from dora_rl.envs.data import Problem

Builtin: TypeAlias = Callable[..., float]

_NUMBER = re.compile(
    r"(?:(?<![\w).])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<![\d.])\.\d+)?", re.ASCII
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MATH_SECONDS = 5
_CODE_SHARE = 0.7
"""Share of the deadline that running code may take; the rest is for starting and cleaning up on a busy machine."""


def builtin(name: str, seconds: float) -> Builtin | None:
    """The function of this name, which keeps to a deadline in seconds; None if the name is not a builtin."""
    kind, colon, rest = name.partition(":")
    if kind == "format" and colon:
        return _format(rest)
    if name == "math":
        _need("math_verify", "math")
    if name == "reasoning_gym":
        _need("reasoning_gym", "reasoning_gym")
    if name == "code":
        return CodeReward(_CODE_SHARE * seconds)
    return BUILTINS.get(name)


def exact(completion: str, answer: str | None) -> float:
    """1 if the completion equals the answer, apart from surrounding white space."""
    return float(completion.strip() == _wanted(answer).strip())


def contains(completion: str, answer: str | None) -> float:
    """1 if the completion contains the answer."""
    wanted = _wanted(answer).strip()
    if not wanted:
        raise ValueError("the answer is empty")
    return float(wanted in completion)


def number(completion: str, answer: str | None) -> float:
    """1 if the last number in the completion equals the last number in the answer."""
    wanted = last_number(_wanted(answer))
    if wanted is None:
        raise ValueError("the answer has no number")
    return float(last_number(completion) == wanted)


def last_number(text: str) -> Decimal | None:
    """The last number in a text. Thousands may have commas; a minus sign counts unless it is a subtraction."""
    found = [match for match in _NUMBER.findall(text) if match.strip("-\u2212")]
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None


def math(completion: str, answer: str | None) -> float:
    """1 if math-verify finds the completion's expression equal to the answer's."""
    import math_verify

    # Its timeout uses signals and needs the main thread; in other threads only `reward.timeout_seconds` applies.
    seconds = _MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    wanted = _wanted(answer)
    bare = "\\" in wanted and "$" not in wanted and "\\boxed" not in wanted
    gold = math_verify.parse(f"${wanted}$" if bare else wanted, parsing_timeout=seconds)
    if not gold:
        raise ValueError("math-verify finds no expression in the answer")
    found = math_verify.parse(completion, parsing_timeout=seconds)
    return float(math_verify.verify(gold, found, timeout_seconds=seconds))


def reasoning_gym(problem: Problem, completion: str) -> float:
    """The score that the row's dataset gives to the text in <answer> tags, or to the whole completion without tags."""
    origin = problem.columns.get("reasoning_gym") or _origin(problem)
    dataset = _dataset(origin["dataset"], json.dumps(origin["params"], sort_keys=True))
    entry = {name: problem.columns.get(name) for name in ("question", "answer", "metadata")}
    if "index" in origin:
        # Some entries hold values that JSON can't represent, so the dataset's own entry is used for the same problem.
        made = dataset[origin["index"]]
        entry = made if made["question"] == entry["question"] else entry
    tagged = _TAGGED.findall(completion)
    return float(dataset.score_answer((tagged[-1] if tagged else completion).strip(), entry))


def _origin(problem: Problem) -> dict[str, Any]:
    """Rows that were exported from reasoning-gym name their dataset in their metadata."""
    metadata = problem.columns.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError("the row does not come from reasoning-gym")
    return {"dataset": metadata["source_dataset"], "params": {}}


@lru_cache(maxsize=32)
def _dataset(name: str, params: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(params))


def _format(pattern: str) -> Builtin:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward 'format:{pattern}' is not a regular expression: {error}") from error

    def matches(completion: str) -> float:
        return float(compiled.search(completion) is not None)

    return matches


def _wanted(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the row has no answer")
    return answer


def _need(module: str, name: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"reward '{name}' needs the extra 'tasks': pip install 'dora-rl[tasks]'")


NAMES = ("code", "contains", "exact", "math", "number", "reasoning_gym")
BUILTINS: dict[str, Builtin] = {
    "exact": exact,
    "contains": contains,
    "number": number,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
