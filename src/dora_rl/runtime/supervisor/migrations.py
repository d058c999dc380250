"""Migration of running requests with their KV cache: the whole protocol, from command to event.

    Move -> ExportKv -> KvExported -> ImportKv -> KvImported -> Moved, or MoveFailed for requests that did not arrive

The source packs the requests that still run into a KV bundle, in memory that both ends can read; the target unpacks it.

Invariants:
- each move ends with `Moved` or `MoveFailed` for every request in its bundle, or with the loss of its source, which the
  orchestrator learns as `InstanceLost`;
- a bundle whose target is gone is discarded, so that its memory can be used again;
- requests that ended before the export are not in the bundle, and are reported in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Attempt, InstanceId, TrajectoryId
from dora_rl.runtime.transport import messages as m

Moving = list[tuple[TrajectoryId, Attempt]]


class Instances(Protocol):
    """Where the messages of a migration are sent."""

    def send(self, instance: InstanceId, message: m.Message) -> bool:
        """Send to an instance; False if it is gone."""
        ...


class Migrations:
    """The moves that are in progress."""

    def __init__(
        self, instances: Instances, emit: Callable[[e.Event], None], discard_kv: Callable[[str], None]
    ) -> None:
        self._instances = instances
        self._emit = emit
        self._discard_kv = discard_kv
        self._commands: dict[int, c.Move] = {}
        """All moves in progress."""
        self._exported: dict[int, m.KvExported] = {}
        """Those whose bundle is on its way to the target."""
        self._last = 0

    def start(self, command: c.Move) -> None:
        """Ask the source for a bundle. If it is gone, the orchestrator is about to learn that from `InstanceLost`."""
        move = self._last + 1
        export = m.ExportKv(move=move, trajectories=command.trajectories, attempts=command.attempts)
        if self._instances.send(command.source.instance, export):
            self._last = move
            self._commands[move] = command

    def exported(self, message: m.KvExported) -> None:
        """Send the bundle on to the target."""
        command = self._commands[message.move]
        if not message.trajectories:
            del self._commands[message.move]
            return
        if message.problem:
            del self._commands[message.move]
            self._emit_failed(command, _requests(message), kept=True)
            return
        self._exported[message.move] = message
        bundle = m.ImportKv(move=message.move, bundle=message.bundle, slot=command.target.number)
        if not self._instances.send(command.target.instance, bundle):
            self._fail(message.move)

    def imported(self, message: m.KvImported) -> None:
        """Report which requests arrived."""
        command, requests = self._commands.pop(message.move), _requests(self._exported.pop(message.move))
        arrived = [request for request in requests if request[0] in message.arrived]
        missing = [request for request in requests if request[0] not in message.arrived]
        if arrived:
            trajectories, attempts = zip(*arrived, strict=True)
            self._emit(
                e.Moved(trajectories=trajectories, attempts=attempts, source=command.source, target=command.target)
            )
        if missing:
            self._emit_failed(command, missing)

    def instance_lost(self, instance: InstanceId) -> None:
        """End the moves that can't be completed: their requests continue from their tokens."""
        for move, command in list(self._commands.items()):
            if command.target.instance == instance and move in self._exported:
                self._fail(move)
            elif command.source.instance == instance and move not in self._exported:
                del self._commands[move]

    def _fail(self, move: int) -> None:
        command, message = self._commands.pop(move), self._exported.pop(move)
        self._discard_kv(message.bundle)
        self._emit_failed(command, _requests(message))

    def _emit_failed(self, command: c.Move, requests: Moving, *, kept: bool = False) -> None:
        trajectories, attempts = zip(*requests, strict=True)
        self._emit(
            e.MoveFailed(
                trajectories=trajectories, attempts=attempts, source=command.source, target=command.target, kept=kept
            )
        )


def _requests(message: m.KvExported) -> Moving:
    return list(zip(message.trajectories, message.attempts, strict=True))
