"""What every role client has in common.

A role client is the supervisor's side of one worker role. It owns the protocol of that role in both directions, and all
state that belongs to it: no other module writes that state. The supervisor routes to it

    execute(command)           commands of the orchestrator, those listed in `commands`
    receive(worker, message)   messages of its workers
    lost(worker, ...)          the end of one of its workers that was not asked for

A client never calls the orchestrator. What happened goes out through `Hooks.emit`, one event at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Nanoseconds
from dora_rl.runtime.launch.process_manager import WorkerProcess
from dora_rl.runtime.transport import messages as m


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a client may ask of the supervisor."""

    emit: Callable[[e.Event], None]
    """Queue an event for the orchestrator."""
    notify: Callable[[str], None]
    """Show a sentence to the user."""
    worker_lost: Callable[[WorkerProcess, str], None]
    """Report that a worker has ended, or has to be ended, for this reason."""
    share_cores: Callable[[], None]
    """Share out the CPU cores again, since a worker became busy or idle."""
    now: Callable[[], Nanoseconds]
    """The run's clock."""


class CommandExecutor(Protocol):
    """Carries out commands of the orchestrator."""

    commands: ClassVar[tuple[type[c.Command], ...]]
    """The commands that it carries out."""

    def execute(self, command: c.Command) -> None:
        """Start what a command asks for; the result comes back as an event."""
        ...


class WorkerClient(Protocol):
    """Talks to the workers of one role."""

    def owns(self, worker: WorkerProcess) -> bool:
        """Whether this worker belongs to the role."""
        ...

    def receive(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        """Handle a message of one of its workers."""
        ...

    def lost(self, worker: WorkerProcess, reason: str, *, restarts: bool) -> None:
        """One of its workers has ended; `restarts` says whether the process manager will start it again."""
        ...
