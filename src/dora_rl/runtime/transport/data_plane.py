"""How weights and moved requests come to an instance: a port, and this machine behind it.

Invariant: whatever carries them, weights are proven by their fingerprint on what is served, and a bundle that is lost
or damaged is a `BundleError`, after which its requests go on from their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from dora_rl.core.types import TrajectoryId

if TYPE_CHECKING:
    from dora_rl.engine.interface import KvMigration
    from dora_rl.engine.kv_transfer.format import KvBundle
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.transport.messages import StartWorker
    from dora_rl.runtime.transport.weight_source import Leasing


class DataPlane(Protocol):
    """What an instance takes weights and bundles from."""

    @property
    def address(self) -> str:
        """Of this machine, where the other processes of the run reach it."""
        ...

    def weights(self, start: StartWorker, config: RunConfig) -> Leasing:
        """The published versions."""
        ...

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        """Requests leave the engine, to be fetched under this name."""
        ...

    def fetch(self, name: str) -> KvBundle:
        """The bundle of this name."""
        ...


class LocalDataPlane:
    """Files that are mapped, and shared memory."""

    address = "127.0.0.1"

    def weights(self, start: StartWorker, config: RunConfig) -> Leasing:
        from dora_rl.runtime.run_dir import RunDir

        return RunDir.open(start.folder).store(config)

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        return engine.export(trajectories).name

    def fetch(self, name: str) -> KvBundle:
        from dora_rl.engine.kv_transfer.format import KvBundle

        return KvBundle.attach(name)
