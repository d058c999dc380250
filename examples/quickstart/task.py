"""Multiplication by repeated addition, modulo 10, written out step by step.

    prompt      3*4+7=
    response    2*4+1=1*4+5=0*4+9=9

A step subtracts one from the count and adds the addend to the last digit, so it is easy and depends only on the step
before; a long chain without a mistake is hard. The problem determines the length of its right response: the count is
drawn from a lognormal distribution, and the lengths have its tail.

Invariants:
- the same arguments give the same problems, on any machine;
- the training problems and the held-out problems have no prompt in common;
- the reward is 1 only if every step is right, and at most 0.5 otherwise; no response can raise an error, since it is
  only compared.
"""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypedDict

Split = Literal["train", "held_out"]
Tail = Literal["light", "medium", "heavy"]

ALPHABET = "0123456789*+="
LONGEST = 130
"""Highest count. Its response has fewer than 1,024 tokens."""
MAX_TOKENS = 1024
"""Room for the longest right response with its end token, and some more for a wrong one."""
HELD_OUT = 5
"""One prompt in this many is held out."""


class Lengths(NamedTuple):
    """Lognormal distribution of the count, cut off at 1 and `LONGEST`."""

    median: float
    sigma: float


# All three have about the same mean, so that a training step has about the same number of tokens with each.
TAILS: dict[Tail, Lengths] = {
    "light": Lengths(12.5, 0.3),
    "medium": Lengths(10.5, 0.6),
    "heavy": Lengths(7.0, 1.25),
}


class Row(TypedDict):
    """One problem as a row of a dataset."""

    prompt: str
    answer: str
    steps: int


class Problem(NamedTuple):
    """Asks for the last digit of times * addend + digit."""

    times: int
    addend: int
    digit: int

    def __str__(self) -> str:
        return f"{self.times}*{self.addend}+{self.digit}"

    def then(self) -> Problem:
        """The problem after one addition."""
        return Problem(self.times - 1, self.addend, (self.digit + self.addend) % 10)

    @property
    def answer(self) -> int:
        return (self.times * self.addend + self.digit) % 10

    @property
    def held_out(self) -> bool:
        return zlib.crc32(str(self).encode()) % HELD_OUT == 0

    def row(self) -> Row:
        return Row(prompt=f"{self}=", answer=str(self.answer), steps=self.times)


def problems(count: int = 4096, seed: int = 0, split: Split = "train", tail: Tail = "heavy") -> Iterator[Row]:
    """`count` rows, which depend only on the arguments."""
    dice = random.Random(f"{seed} {split} {tail}")
    for _ in range(count):
        yield draw(dice, split, tail).row()


def held_out(count: int = 256, seed: int = 0, tail: Tail = "heavy") -> Iterator[Row]:
    """Problems that training never sees."""
    return problems(count, seed, "held_out", tail)


def draw(dice: random.Random, split: Split, tail: Tail) -> Problem:
    """Draw one problem; problems outside the bounds or in the other split are drawn again."""
    lengths = TAILS[tail]
    while True:
        times = round(dice.lognormvariate(math.log(lengths.median), lengths.sigma))
        problem = Problem(times, dice.randint(1, 9), dice.randint(0, 9))
        if 1 <= times <= LONGEST and problem.held_out == (split == "held_out"):
            return problem


def chain(problem: Problem) -> list[str]:
    """The steps of the right response, which equals signs separate, and its answer."""
    steps: list[str] = []
    while problem.times:
        problem = problem.then()
        steps.append(str(problem))
    return [*steps, str(problem.digit)]


def solution(prompt: str) -> str:
    """The right response to a prompt."""
    return "=".join(chain(parse(prompt)))


def parse(prompt: str) -> Problem:
    """The problem of a prompt."""
    found = re.fullmatch(r"([0-9]{1,3})\*([1-9])\+([0-9])=", prompt)
    if found is None:
        raise ValueError(f"'{prompt[:40]}' is not a prompt of this task, which looks like '3*4+7='")
    return Problem(*map(int, found.groups()))


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for a right response; otherwise half the share of the steps that are right up to the first mistake."""
    return [_score(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]


def _score(prompt: str, completion: str) -> float:
    right = chain(parse(prompt))
    given = completion.split("=", maxsplit=len(right))
    if given == right:
        return 1.0
    leading = next((index for index, (a, b) in enumerate(zip(given, right, strict=False)) if a != b), None)
    return 0.5 * (min(len(given), len(right)) if leading is None else leading) / len(right)
