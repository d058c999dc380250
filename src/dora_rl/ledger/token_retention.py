"""Which trained groups still have their tokens in the ledger, and which of them can be deleted; a projection.

Invariants:
- the tokens of a group are kept until a checkpoint contains the step that trained it, since a trainer that restarts
  from an older checkpoint is sent the group again;
- the tokens of a group that ended without signal are deleted in the transaction that writes this: nothing needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import GroupId, Nanoseconds, StepId, Version


class TokenRetention:
    """Trained groups by their step."""

    def __init__(self, trained: Iterable[tuple[StepId, GroupId]]) -> None:
        self._groups: dict[StepId, set[GroupId]] = {}
        self._checkpointed: Version = 0
        self._without_signal: list[GroupId] = []
        for step, group in trained:
            self._groups.setdefault(step, set()).add(group)

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:  # noqa: ARG002
        """Take in an event and the commands that the orchestrator answered it with."""
        for command in commands:
            if isinstance(command, c.Apply):
                self._groups.setdefault(command.step, set()).update(command.groups)
            elif isinstance(command, c.GroupWithoutSignal):
                self._without_signal.append(command.group)
        if isinstance(event, e.Checkpointed):
            self._checkpointed = max(self._checkpointed, event.version)

    def released(self) -> list[StepId]:
        """Steps before the checkpointed version: no trainer can ask for their groups again."""
        return [step for step in self._groups if step < self._checkpointed]

    def take_without_signal(self) -> list[GroupId]:
        """Groups that ended without signal since the last call."""
        groups, self._without_signal = self._without_signal, []
        return groups

    def groups(self, step: StepId) -> set[GroupId]:
        """The groups that a step trained."""
        return self._groups[step]

    def forget(self, step: StepId) -> None:
        """The tokens of a step are deleted."""
        del self._groups[step]
