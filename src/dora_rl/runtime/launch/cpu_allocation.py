"""How the cores of a machine are divided between rollout and training.

Busy processes get cores, waiting processes give them up. While the trainer waits, rollout has its cores; while rollout
waits for the trainer, the trainer has them. Each process gets at least one thread; where there are more processes than
cores, the operating system divides the time.

Where rollout and training overlap, instances that are idle now will be busy again before the trainer has finished its
current work, and a new number of threads reaches the trainer only after that. So the trainer does not borrow their
cores: trainer threads that wait for a thread without a core cost it far more than another core gains.

Where there are more processes than cores, niceness weighs them against each other. Niceness counts against other
programs on the machine too, so it is the least that leaves the trainer its cores, and zero where rollout and training
take turns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_LEVEL = 1.25
"""The factor of CPU weight between two levels of niceness on Linux."""
_NICEST = 15
_SHARED = 0.25
"""Weight of all instances together on a single core that they share with the trainer, whose weight is 1."""


class Shares(NamedTuple):
    """Threads per process."""

    instance: int
    """Of an instance that has requests."""
    trainer: int


def share(cores: int, instances: int, busy: int, *, trainer_busy: bool, overlap: bool) -> Shares:
    """Threads by role, where `busy` of the instances have requests."""
    rollout = instances if overlap else busy
    return Shares(
        instance=1 if trainer_busy else max(1, cores // max(1, busy)),
        trainer=max(1, cores - rollout),
    )


def niceness(cores: int, instances: int, *, overlap: bool) -> int:
    """Niceness of an instance relative to the trainer: all instances together weigh as much as the cores left to
    them."""
    if not overlap:
        return 0
    left = cores - share(cores, instances, instances, trainer_busy=True, overlap=True).trainer
    levels = math.log(instances / (left or _SHARED)) / math.log(_LEVEL)
    return min(_NICEST, max(0, math.ceil(levels)))
