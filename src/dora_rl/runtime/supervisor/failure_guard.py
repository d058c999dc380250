"""Ends a run that makes no progress: groups are admitted, fail and are replaced, one after the other.

One failed group is data. If none succeeds while the bound could be filled twice, the next one won't either: the
policy's numbers have overflowed, or a reward function raises for every response. Then the run ends, with everything
kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import RunError
from dora_rl.core.types import Nanoseconds, Version
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryStore

_FEWEST = 16
"""Failed groups in a row that a run survives in any case: small jobs can have bad luck."""
_NAMED = 8
"""Trajectories that the error names."""


class FailureGuard:
    """The groups that failed since one succeeded; a projection that is applied after the trajectory store."""

    def __init__(self, config: ControlConfig, trajectories: TrajectoryStore) -> None:
        self._size = config.group_size
        self._most = max(_FEWEST, 2 * (config.largest_staleness + 1) * config.groups_per_step)
        self._trajectories = trajectories
        self._failed: list[c.GroupFailed] = []

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:  # noqa: ARG002
        """Fold an event and the commands that answered it."""
        self._failed += [command for command in commands if isinstance(command, c.GroupFailed)]
        ended = [command.trajectory for command in commands if isinstance(command, c.FailTrajectory)]
        if isinstance(event, e.Scored):
            ended.append(event.trajectory)
        if any(isinstance(command, c.GroupWithoutSignal) for command in commands) or any(
            self._succeeded(trajectory // self._size) for trajectory in ended
        ):
            self._failed.clear()

    def check(self, newest: Version | None) -> None:
        """Raise `RunError` if too many groups failed in a row."""
        if len(self._failed) > self._most:
            raise RunError(self._sentence(newest))

    def reset(self) -> None:
        """A run that is resumed gets another chance: its user has fixed what made the groups fail."""
        self._failed.clear()

    def _succeeded(self, group: int) -> bool:
        """Whether the group is complete and will be trained; the store has no groups that were replaced."""
        entry = self._trajectories.groups.get(group)
        return entry is not None and all(one.failed or one.reward is not None for one in entry.trajectories.values())

    def _sentence(self, newest: Version | None) -> str:
        last = self._failed[-1]
        first = last.group * self._size
        named = ", ".join(map(str, range(first, first + min(self._size, _NAMED))))
        return (
            f"step {newest} has nothing to train: {len(self._failed)} groups failed in a row, the last of them with "
            f"trajectories {named}: {last.reasons[-1]}; fix the cause and resume the run, or start a new run from its "
            "last checkpoint"
        )
