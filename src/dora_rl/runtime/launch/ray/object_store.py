"""What the instances of all nodes share through Ray's object store: published versions and KV bundles.

Invariants:
- the supervisor puts each version into the object store once, so it outlives the trainer that made it; each node
  receives it once, and the instances of the node map it;
- the supervisor holds a version until it is retired, and a KV bundle until it is fetched or discarded; a process that
  maps one holds it too;
- an object that is lost with its node raises a typed error in the process that asks for it.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import ray

from dora_rl.core.errors import BundleError, StoreError
from dora_rl.core.types import TrajectoryId, Version

if TYPE_CHECKING:
    # Only for types: a reward worker need not wait until torch is imported.
    from dora_rl.engine.interface import KvMigration
    from dora_rl.engine.kv_transfer.format import KvBundle
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.transport.messages import StartWorker
    from dora_rl.weights.buffer import WeightBuffer
    from dora_rl.weights.store import WeightStore

logger = logging.getLogger(__name__)

_FETCH_SECONDS = 60.0
"""Time for an object to arrive from another node."""


class ObjectStore:
    """The supervisor's side; all methods may be called from any thread."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._versions: dict[Version, Any] = {}
        self._bundles: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find_version(self, version: Version) -> list[Any]:
        """The reference to a version; empty if there is no such version."""
        with self._lock:
            if version not in self._versions:
                try:
                    data = _mapped(self._store, version)
                except FileNotFoundError:
                    return []
                self._versions[version] = ray.put(data)
                logger.info("put version %d into the object store, %d bytes", version, data.nbytes)
            return [self._versions[version]]

    def version_retired(self, version: Version) -> None:
        with self._lock:
            self._versions.pop(version, None)

    def hold_bundle(self, name: str, bundle: Any) -> None:
        """Hold the reference to a KV bundle until it is taken."""
        with self._lock:
            self._bundles[name] = bundle

    def take_bundle(self, name: str) -> list[Any]:
        """The reference to a KV bundle, which is not held here any more; empty if there is no such bundle."""
        with self._lock:
            bundle = self._bundles.pop(name, None)
        return [] if bundle is None else [bundle]


class RayDataPlane:
    """An instance's side; `supervisor` is the actor that has the `ObjectStore`."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor

    @property
    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def weights(self, start: StartWorker, config: RunConfig) -> RayDataPlane:  # noqa: ARG002
        return self

    def lease(self, version: Version) -> WeightBuffer:
        """A version, mapped from the object store of this node."""
        from dora_rl.weights.buffer import WeightBuffer

        try:
            found = ray.get(self._supervisor.find_version.remote(version), timeout=_FETCH_SECONDS)
            if not found:
                raise StoreError(f"version {version} is not there")
            return WeightBuffer(version, ray.get(found[0], timeout=_FETCH_SECONDS))
        except ray.exceptions.RayError as error:
            raise StoreError(f"version {version} did not arrive: {error}") from error

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        """Requests leave as bytes, with digests that cover their KV."""
        name = f"bundle-{uuid4().hex}"
        data = np.frombuffer(engine.export(trajectories, shared=False).to_bytes(), dtype=np.uint8)
        logger.info("exported KV bundle %s, %d bytes", name, data.nbytes)
        try:
            ray.get(self._supervisor.hold_bundle.remote(name, [ray.put(data)]), timeout=_FETCH_SECONDS)
        except ray.exceptions.RayError as error:
            # The importer will not find the bundle, and its requests are resumed from their tokens.
            logger.warning("KV bundle %s is lost: %s", name, error)
        return name

    def fetch(self, name: str) -> KvBundle:
        from dora_rl.engine.kv_transfer.format import KvBundle

        try:
            found = ray.get(self._supervisor.take_bundle.remote(name), timeout=_FETCH_SECONDS)
            if not found:
                raise BundleError(f"the bundle '{name}' is gone")
            data = memoryview(ray.get(found[0], timeout=_FETCH_SECONDS))
        except ray.exceptions.RayError as error:
            raise BundleError(f"the bundle '{name}' is lost: {error}") from error
        logger.info("importing KV bundle %s, %d bytes", name, data.nbytes)
        return KvBundle.from_bytes(data)


def _mapped(store: WeightStore, version: Version) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with store.path(version).open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
