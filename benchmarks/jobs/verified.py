"""A verifier that takes its time, as running tests or asking a judge does: the reward is only known after a while."""

from __future__ import annotations

import asyncio
import math
import random

MEDIAN_SECONDS = 0.1
MOST_SECONDS = 2.0


async def takes_its_time(prompt: str, completion: str) -> float:
    """Worth nothing. How long it takes follows from the problem and the response, and has a long tail."""
    dice = random.Random(f"{prompt} {completion}")
    await asyncio.sleep(min(MOST_SECONDS, dice.lognormvariate(math.log(MEDIAN_SECONDS), 1.0)))
    return 0.0
