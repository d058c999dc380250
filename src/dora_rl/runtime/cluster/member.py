"""A process of a run in a Ray actor: it knocks at its supervisor's door and plays its role.

Invariants:
- the role is played in the main thread, since rewards may use signals; nothing else is asked of the actor;
- the actor's process ends with the role, and with the supervisor, which owns the actor.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from dora_rl.runtime.nursery import ENVIRONMENT


class Member:
    """The actor."""

    def __init__(self, supervisor: Any, token: bytes, log: str) -> None:
        os.environ.update(ENVIRONMENT)  # before torch is imported
        self._supervisor = supervisor
        self._token = token
        with contextlib.suppress(OSError):  # a node that does not have the run's folder keeps what is printed itself
            _print_to(Path(log))

    def serve(self) -> None:
        """Until the role is over; does not return then."""
        import ray

        from dora_rl.runtime.child import play
        from dora_rl.runtime.cluster.door import enter
        from dora_rl.runtime.cluster.shelf import RayCarriage

        here = ray.util.get_node_ip_address()
        address, port = ray.get(self._supervisor.door.remote(here))
        node = ray.get_runtime_context().get_node_id()
        link, ahead = enter(address, port, self._token, node)
        play(link, RayCarriage(self._supervisor), ahead)
        ray.actor.exit_actor()


def _print_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
