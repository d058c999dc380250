"""How weights and moved requests reach an instance: the interface, and its implementation for one machine.

Invariant: with every implementation, weights are proven by their fingerprint on what is served, and a KV bundle that is
lost or damaged raises a `BundleError`, after which its requests are resumed from their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from dora_rl.core.types import TrajectoryId

if TYPE_CHECKING:
    from dora_rl.engine.interface import KvMigration
    from dora_rl.engine.kv_transfer.format import KvBundle
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.transport.messages import StartWorker
    from dora_rl.runtime.transport.weight_source import Leasing

logger = logging.getLogger(__name__)


class DataPlane(Protocol):
    """Carries weights and KV bundles to an instance."""

    @property
    def address(self) -> str:
        """Address of this machine, at which the other processes of the run reach it."""
        ...

    def weights(self, start: StartWorker, config: RunConfig) -> Leasing:
        """The published versions."""
        ...

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        """Take requests out of the engine; return the name under which their KV bundle can be fetched."""
        ...

    def fetch(self, name: str) -> KvBundle:
        """The KV bundle of this name."""
        ...


class LocalDataPlane:
    """One machine: weights are memory-mapped files, KV bundles are shared memory."""

    address = "127.0.0.1"

    def weights(self, start: StartWorker, config: RunConfig) -> Leasing:
        from dora_rl.runtime.run_dir import RunDir

        return RunDir.open(start.folder).store(config)

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        bundle = engine.export(trajectories)
        logger.info("exported KV bundle %s, %d bytes", bundle.name, bundle.memory.nbytes)
        return bundle.name

    def fetch(self, name: str) -> KvBundle:
        from dora_rl.engine.kv_transfer.format import KvBundle

        bundle = KvBundle.attach(name)
        logger.info("importing KV bundle %s, %d bytes", name, bundle.memory.nbytes)
        return bundle
