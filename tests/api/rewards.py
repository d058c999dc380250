"""Reward functions with an import path."""

from __future__ import annotations

from typing import Any


def odd_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(letter in "13579" for letter in text) / 48 for text in completions]


def brevity(prompt: str, completion: str, answer: str | None, number: int) -> dict[str, float]:
    """A function for one answer, which also gets the column `number`."""
    return {"score": -len(completion) / 200, "number": float(number)}


class Judge:
    """A callable object: it has no import path."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [self.value for _ in completions]
