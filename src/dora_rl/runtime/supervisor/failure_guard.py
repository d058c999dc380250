"""Notices that a run no longer gets anywhere: groups are admitted, fail and are replaced, one after the other.

One group that fails is data. If none ends well between two full loads of the bound, the next one won't either: the
policy's numbers have overflowed, or a reward raises whatever it is asked. Then the run ends, with everything kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import RunError
from dora_rl.core.types import Version
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore

_FEWEST = 16
"""Groups in a row that a run survives in any case: small jobs can have bad luck."""
_NAMED = 8


class FailureGuard:
    """The groups that failed since one ended well."""

    def __init__(self, config: ControlConfig, books: TrajectoryStore) -> None:
        self._size = config.group_size
        self._most = max(_FEWEST, 2 * (config.max_staleness + 1) * config.groups_per_step)
        self._books = books
        self._failed: list[c.GroupFailed] = []

    def note(self, event: e.Event, commands: Sequence[c.Command], newest: Version | None) -> None:
        """An event and what answered it, after the books have taken note; raises `RunError` if all was in vain."""
        self._failed += [command for command in commands if isinstance(command, c.GroupFailed)]
        ended = [command.trajectory for command in commands if isinstance(command, c.FailTrajectory)]
        if isinstance(event, e.Scored):
            ended.append(event.trajectory)
        if any(self._well(trajectory // self._size) for trajectory in ended):
            self._failed.clear()
        if len(self._failed) > self._most:
            raise RunError(self._sentence(newest))

    def _well(self, group: int) -> bool:
        """The group is over and goes to the trainer; the books have none that failed."""
        book = self._books.groups.get(group)
        return book is not None and all(one.failed or one.reward is not None for one in book.trajectories.values())

    def _sentence(self, newest: Version | None) -> str:
        last = self._failed[-1]
        first = last.group * self._size
        named = ", ".join(map(str, range(first, first + min(self._size, _NAMED))))
        return (
            f"step {newest} finds nothing to train: {len(self._failed)} groups failed in a row, the last of them with "
            f"trajectories {named}: {last.reasons[-1]}; mend that and resume the run, or begin a new one from its last "
            "checkpoint"
        )
