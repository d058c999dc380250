"""A small agent task: problems come one after another, each after a slow tool call.

The number of problems and the duration of each tool call depend on the row alone and have long tails, so every mode has
the same work.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from typing import Any

MOST_TURNS = 30
MOST_SECONDS = 2.0


def problems(count: int = 4096, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows with the number of tool calls and a seed for their durations."""
    dice = random.Random(seed)
    for number in range(count):
        turns = min(MOST_TURNS, max(1, round(dice.lognormvariate(math.log(3.0), 0.9))))
        yield {
            "prompt": f"{dice.randint(1, 3)}*{dice.randint(1, 9)}+{dice.randint(0, 9)}=",
            "turns": turns,
            "row": number,
        }


class Tools:
    """Answers each turn with the next problem after a delay."""

    def reset(self, problem: Any) -> None:
        self._left = int(problem.columns["turns"])
        self._dice = random.Random(int(problem.columns["row"]))

    def step(self, text: str) -> tuple[str | None, float, bool]:
        time.sleep(min(MOST_SECONDS, self._dice.lognormvariate(math.log(0.1), 1.0)))
        self._left -= 1
        reward = 1.0 if text[-1:].isdigit() else 0.0
        if self._left <= 0:
            return None, reward, True
        return f"{self._dice.randint(1, 3)}*{self._dice.randint(1, 9)}+{self._dice.randint(0, 9)}=", reward, False
