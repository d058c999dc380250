"""Problems: rows of any source, checked and converted to plain JSON values.

Invariants:
- a problem's key depends on its content and its row number in the source, never on shuffling, limits or held-out rows,
  so that a ledger recognises it in a later run;
- a problem consists of JSON values only, since it crosses processes;
- held-out rows are set aside before any shuffling, from the end of the rows read, and never appear in `train`;
- the order of an epoch depends only on the seed, the epoch and the number of rows.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dora_rl.core.errors import DataError
from dora_rl.core.types import Record
from dora_rl.envs.config import DataConfig
from dora_rl.envs.row_readers import Row, rows


class ChatMessage(Record, frozen=True, kw_only=True):
    """One message of a chat."""

    role: str
    content: str


PromptText: TypeAlias = str | tuple[ChatMessage, ...]


class Problem(Record, frozen=True, kw_only=True):
    """One row: the prompt, the right answer if there is one, and the other columns."""

    key: str
    prompt: PromptText
    answer: str | None = None
    columns: dict[str, Any] = msgspec.field(default_factory=dict)
    """All columns except the prompt, under their own names and with their own types; `answer` is the answer as it is in
    the row, whatever the name of its column."""


class Dataset(Record, frozen=True, kw_only=True):
    """All problems of a run."""

    train: Sequence[Problem]
    held_out: Sequence[Problem]
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None

    def order(self, epoch: int) -> list[int]:
        """Indices into `train`, in the order of an epoch."""
        indices = range(len(self.train))
        if not self.shuffle:
            return list(indices)
        return sorted(indices, key=lambda index: _digest(f"{self.seed}/{epoch}/{index}".encode()))


def load(config: DataConfig, folder: Path) -> Dataset:
    """Read and check all problems; relative paths are relative to `folder`."""
    chosen = itertools.islice(rows(config, folder), config.limit)
    problems = [problem(row, number, config) for number, row in enumerate(chosen)]
    if not problems:
        raise DataError(f"{config.source} has no rows")
    if config.held_out >= len(problems):
        raise DataError(f"{config.source} has {len(problems)} rows: holding out {config.held_out} leaves none to train")
    split = len(problems) - config.held_out
    return Dataset(
        train=problems[:split],
        held_out=problems[split:],
        shuffle=config.shuffle,
        seed=config.seed,
        epochs=config.epochs,
    )


def problem(row: Row, number: int, config: DataConfig) -> Problem:
    """One row as a problem, or an error that names the row."""
    try:
        value = plain(row.value)
        if not isinstance(value, dict):
            raise _BadRowError("the row must be an object with columns")
        content = msgspec.json.encode(value, order="sorted")
        msgspec.msgpack.encode(value)
        answer = _answer(value, config)
        columns = {name: item for name, item in value.items() if name != config.prompt}
        return Problem(
            key=f"{number}-{_digest(content).hex()}",
            prompt=_prompt(value, config),
            answer=answer if answer is None or isinstance(answer, str) else msgspec.json.encode(answer).decode(),
            columns=columns if answer is None else {**columns, "answer": answer},
        )
    except _BadRowError as error:
        raise DataError(f"{row.where}: {error}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{row.where} has a value that JSON can't represent: {error}") from error


class _BadRowError(Exception):
    """What is wrong with a row, without the row's position."""


def plain(value: Any) -> Any:
    """A value of any source, as plain JSON types."""
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, float):
        # JSON has no NaN or infinity; data frames use NaN for missing values.
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_name(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise _BadRowError(f"a value of type {type(value).__name__} can't be used: leave that column out")


def _name(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    if isinstance(key, int):
        return str(int(key))
    raise _BadRowError(f"the key {key!r} is not a text")


def _prompt(value: dict[str, Any], config: DataConfig) -> PromptText:
    if config.prompt not in value:
        raise _BadRowError(
            f"there is no column '{config.prompt}': set data.prompt to one of {', '.join(sorted(value)) or 'none'}"
        )
    given = value[config.prompt]
    if isinstance(given, str):
        if not given:
            raise _BadRowError(f"'{config.prompt}' is empty")
        return given if config.system is None else (*_system(config), ChatMessage(role="user", content=given))
    if not isinstance(given, list) or not given:
        raise _BadRowError(f"'{config.prompt}' must be a text or a list of messages")
    messages = tuple(_message(item, number) for number, item in enumerate(given, 1))
    return messages if messages[0].role == "system" else (*_system(config), *messages)


def _system(config: DataConfig) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="system", content=config.system),) if config.system else ()


def _message(item: Any, number: int) -> ChatMessage:
    if not isinstance(item, dict):
        raise _BadRowError(f"message {number} must be an object with role and content")
    given = {key: value for key, value in item.items() if value is not None}
    unknown = sorted(given.keys() - {"role", "content"})
    if unknown:
        raise _BadRowError(f"message {number} has the key '{unknown[0]}': only role and content are supported")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, str) or not role:
        raise _BadRowError(f"message {number} must have role and content, both texts")
    return ChatMessage(role=role, content=content)


def _answer(value: dict[str, Any], config: DataConfig) -> Any:
    """The answer as it is in the row; the default also looks where verl's files have it."""
    found = _at(value, config.answer)
    return _at(value, "reward_model.ground_truth") if found is None and config.answer == "answer" else found


def _at(columns: Mapping[str, Any], path: str) -> Any:
    """A column, or with dots a value inside one; None if there is no such value."""
    if path in columns:
        return columns[path]
    node: Any = columns
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
