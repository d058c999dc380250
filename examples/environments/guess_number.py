"""An environment of several turns: guess a number in as few turns as possible.

Each row needs a column `secret`, a whole number from 1 to `highest`. The environment answers whether a guess is too low
or too high. A right guess gives 1, or 0.5 if it took more turns than a binary search needs at most.
"""

from __future__ import annotations

import math
import re


class GuessNumber:
    def __init__(self, highest: int = 100) -> None:
        self.highest = highest
        self.enough = math.ceil(math.log2(highest + 1))
        self.guesses = 0

    def reset(self, problem):
        self.secret = int(problem.columns["secret"])
        return f"I think of a number from 1 to {self.highest}. What is it?"

    def step(self, text: str):
        self.guesses += 1
        numbers = re.findall(r"\d+", text)
        if not numbers:
            return "Say a number.", 0.0, False
        guess = int(numbers[-1][:10])
        if guess == self.secret:
            return None, 1.0 if self.guesses <= self.enough else 0.5, True
        return "Higher." if guess < self.secret else "Lower.", 0.0, False
