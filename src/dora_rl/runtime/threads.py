"""How the cores of a machine are shared out: the roles of a CPU.

Who works gets cores, who waits gives them up. While the trainer waits, rollout has its cores; while rollout waits for
the trainer, the trainer has them. Each gets at least one; more processes than cores share them by the operating
system's clock.

Where rollout and training overlap, instances that are idle just now work again before the trainer is through with what
it was given, and it hears of its threads only then. So their cores are not lent to it: threads of the trainer that wait
for one that has no core cost it far more than another core brings.
"""

from __future__ import annotations

from typing import NamedTuple


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
