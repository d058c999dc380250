"""Makes problems, files and scorers for the tests of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dora_rl.core.config import build
from dora_rl.envs.config import DataConfig, RewardConfig
from dora_rl.envs.data import ChatMessage, Dataset, Problem, load
from dora_rl.envs.rewards import RewardScorer

CHAT = (ChatMessage(role="user", content="What is 6 x 7?"),)


def a_problem(
    answer: str | None = "42", prompt: str | tuple[ChatMessage, ...] = "What is 6 x 7?", **columns: Any
) -> Problem:
    known = {} if answer is None else {"answer": answer}
    return Problem(key="0-a", prompt=prompt, answer=answer, columns={**known, **columns})


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_code(folder: Path, text: str, name: str = "task.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def loaded(folder: Path, source: str, **settings: Any) -> Dataset:
    return load(build(DataConfig, {"source": source, **settings}), folder)


def scorer(folder: Path, *functions: str, **settings: Any) -> RewardScorer:
    return RewardScorer(build(RewardConfig, {"functions": list(functions), **settings}), folder)
