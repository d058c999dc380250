"""Sums of two or three numbers for SmolLM2: rows and a reward that both sides of a comparison load."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

_SYSTEM = "Answer with the result alone."


def problems(count: int = 512, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Chats with one sum each; the same arguments give the same chats."""
    dice = random.Random(seed)
    for _ in range(count):
        terms = [dice.randint(1, 99) for _ in range(dice.choice((2, 3)))]
        question = f"What is {' + '.join(map(str, terms))}?"
        yield {
            "prompt": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}],
            "answer": str(sum(terms)),
        }


def reward(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the last number of the completion is the answer."""
    del prompts
    return [float(_last_number(_text(one)) == right) for one, right in zip(completions, answer, strict=True)]


def _text(completion: Any) -> str:
    """The text of a completion; TRL passes chats as messages."""
    return str(completion if isinstance(completion, str) else completion[-1]["content"])


def _last_number(text: str) -> str | None:
    found = re.findall(r"-?\d+", text)
    return found[-1] if found else None
