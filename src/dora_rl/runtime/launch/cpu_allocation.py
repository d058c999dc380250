"""How the cores of a machine are shared out: the roles of a CPU.

Who works gets cores, who waits gives them up. While the trainer waits, rollout has its cores; while rollout waits for
the trainer, the trainer has them. Each gets at least one; more processes than cores share them by the operating
system's clock.

Where rollout and training overlap, instances that are idle just now work again before the trainer is through with what
it was given, and it hears of its threads only then. So their cores are not lent to it: threads of the trainer that wait
for one that has no core cost it far more than another core brings.

More processes than cores are weighed against each other by niceness. It counts against other programs on the machine
too, so it is the least that leaves the trainer its cores, and nothing where rollout and training take turns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_LEVEL = 1.25
"""The factor of weight that a level of niceness is worth to Linux."""
_NICEST = 15
_SHARED = 0.25
"""Weight of all instances together on a single core that they share with the trainer, if its own is 1."""


class Shares(NamedTuple):
    """Threads of each."""

    instance: int
    """Of an instance that has requests."""
    trainer: int


def share(cores: int, instances: int, busy: int, *, trainer_busy: bool, overlap: bool) -> Shares:
    """Threads by role, with so many instances, and so many of them at work."""
    rollout = instances if overlap else busy
    return Shares(
        instance=1 if trainer_busy else max(1, cores // max(1, busy)),
        trainer=max(1, cores - rollout),
    )


def niceness(cores: int, instances: int, *, overlap: bool) -> int:
    """Levels by which an instance is nicer than the trainer: all together weigh as much as the cores left to them."""
    if not overlap:
        return 0
    left = cores - share(cores, instances, instances, trainer_busy=True, overlap=True).trainer
    levels = math.log(instances / (left or _SHARED)) / math.log(_LEVEL)
    return min(_NICEST, max(0, math.ceil(levels)))
