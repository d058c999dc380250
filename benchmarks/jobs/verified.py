"""A slow verifier, as slow as running tests or asking another model: the reward comes after a delay."""

from __future__ import annotations

import asyncio
import math
import random

MEDIAN_SECONDS = 0.1
MOST_SECONDS = 2.0


async def slow_verifier(prompt: str, completion: str) -> float:
    """A reward of 0 after a delay that depends on the problem and the response and has a long tail."""
    dice = random.Random(f"{prompt} {completion}")
    await asyncio.sleep(min(MOST_SECONDS, dice.lognormvariate(math.log(MEDIAN_SECONDS), 1.0)))
    return 0.0
