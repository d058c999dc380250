"""Moves under way: out of one instance into memory that both can read, and from there into another.

    Move -> Export -> Exported -> Import -> Imported -> Moved, or MoveFailed for those that did not arrive

A bundle whose target is gone is released here, so that its memory can be used again.
"""

from __future__ import annotations

from collections.abc import Callable

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import InstanceId
from dora_rl.runtime.launch.process_manager import WorkerProcess
from dora_rl.runtime.transport import messages as m


class Moves:
    """The moves of a run."""

    def __init__(
        self,
        find: Callable[[InstanceId], WorkerProcess | None],
        happen: Callable[[e.Event], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._find = find
        self._happen = happen
        self._give_up = give_up
        self._commands: dict[int, c.Move] = {}
        self._exported: dict[int, m.KvExported] = {}
        self._number = 0

    def begin(self, command: c.Move) -> None:
        """Ask the source for a bundle."""
        source = self._find(command.source.instance)
        if source is None:
            return  # the orchestrator is being told that the source is lost
        self._number += 1
        self._commands[self._number] = command
        source.send(m.ExportKv(move=self._number, trajectories=command.trajectories, attempts=command.attempts))

    def exported(self, message: m.KvExported) -> None:
        """Hand the bundle to the target; requests that are not in it have ended meanwhile."""
        command = self._commands[message.move]
        if not message.trajectories:
            del self._commands[message.move]
            return
        if message.problem:
            del self._commands[message.move]
            self._tell_failed(command, list(zip(message.trajectories, message.attempts, strict=True)), kept=True)
            return
        self._exported[message.move] = message
        target = self._find(command.target.instance)
        if target is None:
            self._fail(message.move)
        else:
            target.send(m.ImportKv(move=message.move, bundle=message.bundle, slot=command.target.number))

    def imported(self, message: m.KvImported) -> None:
        """Say who arrived."""
        command, sent = self._commands.pop(message.move), self._exported.pop(message.move)
        pairs = list(zip(sent.trajectories, sent.attempts, strict=True))
        arrived = [pair for pair in pairs if pair[0] in message.arrived]
        missing = [pair for pair in pairs if pair[0] not in message.arrived]
        if arrived:
            trajectories, attempts = zip(*arrived, strict=True)
            self._happen(
                e.Moved(trajectories=trajectories, attempts=attempts, source=command.source, target=command.target)
            )
        if missing:
            self._tell_failed(command, missing)

    def lost(self, instance: InstanceId) -> None:
        """An instance is gone: what was on its way there goes on from its tokens."""
        for move, command in list(self._commands.items()):
            if command.target.instance == instance and move in self._exported:
                self._fail(move)
            elif command.source.instance == instance and move not in self._exported:
                del self._commands[move]

    def _fail(self, move: int) -> None:
        command, sent = self._commands.pop(move), self._exported.pop(move)
        self._give_up(sent.bundle)
        self._tell_failed(command, list(zip(sent.trajectories, sent.attempts, strict=True)))

    def _tell_failed(self, command: c.Move, pairs: list[tuple[int, int]], *, kept: bool = False) -> None:
        trajectories, attempts = zip(*pairs, strict=True)
        self._happen(
            e.MoveFailed(
                trajectories=trajectories, attempts=attempts, source=command.source, target=command.target, kept=kept
            )
        )
