"""How the cores of the machine are shared out: the roles of a CPU.

Who works gets cores, who waits gives them up. While the trainer waits, rollout has its cores, and back. Each gets at
least one; more processes than cores share them by the operating system's clock.
"""

from __future__ import annotations

from typing import NamedTuple


class Shares(NamedTuple):
    """Threads of each."""

    instance: int
    """Of an instance that has requests."""
    trainer: int


def share(cores: int, busy_instances: int, *, trainer_busy: bool) -> Shares:
    """Threads by role, with so many instances at work."""
    if not busy_instances:
        return Shares(instance=1, trainer=cores)
    if not trainer_busy:
        return Shares(instance=max(1, cores // busy_instances), trainer=1)
    return Shares(instance=1, trainer=max(1, cores - busy_instances))
