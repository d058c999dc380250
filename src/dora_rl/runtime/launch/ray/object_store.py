"""What instances of all nodes share through Ray's object store: published versions and moved requests.

Invariants:
- a version is put into the object store once, by the supervisor, so it outlives the trainer that made it; each node
  receives it once and its instances map it;
- the supervisor holds a version until it is retired, and a moved request until it is fetched or given up; whoever maps
  it holds it as well;
- an object that is lost with its node is a typed error of whoever wants it.
"""

from __future__ import annotations

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
    # Only for types: a judge need not wait for torch.
    from dora_rl.engine.interface import KvMigration
    from dora_rl.engine.kv_transfer.format import KvBundle
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.transport.messages import StartWorker
    from dora_rl.weights.buffer import WeightBuffer
    from dora_rl.weights.store import WeightStore

_PATIENCE = 60.0
"""Seconds for an object to come from another node."""


class ObjectStore:
    """The supervisor's end; all methods may be called from any thread."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._versions: dict[Version, Any] = {}
        self._bundles: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, version: Version) -> list[Any]:
        """The reference to a version, if there is such a version."""
        with self._lock:
            if version not in self._versions:
                try:
                    self._versions[version] = ray.put(_mapped(self._store, version))
                except FileNotFoundError:
                    return []
            return [self._versions[version]]

    def retired(self, version: Version) -> None:
        with self._lock:
            self._versions.pop(version, None)

    def keep(self, name: str, bundle: Any) -> None:
        with self._lock:
            self._bundles[name] = bundle

    def take(self, name: str) -> list[Any]:
        """The reference to a bundle; it is here no more then."""
        with self._lock:
            bundle = self._bundles.pop(name, None)
        return [] if bundle is None else [bundle]


class RayDataPlane:
    """An instance's end; `supervisor` is the actor that has the shelf."""

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
            found = ray.get(self._supervisor.find.remote(version), timeout=_PATIENCE)
            if not found:
                raise StoreError(f"version {version} is not there")
            return WeightBuffer(version, ray.get(found[0], timeout=_PATIENCE))
        except ray.exceptions.RayError as error:
            raise StoreError(f"version {version} did not come: {error}") from error

    def export(self, engine: KvMigration, trajectories: Iterable[TrajectoryId]) -> str:
        """Requests leave as bytes, with digests over their KV."""
        name = f"bundle-{uuid4().hex}"
        data = np.frombuffer(engine.export(trajectories, shared=False).to_bytes(), dtype=np.uint8)
        try:
            ray.get(self._supervisor.keep.remote(name, [ray.put(data)]), timeout=_PATIENCE)
        except ray.exceptions.RayError:
            return name  # whoever fetches it will not find it, and its requests go on from their tokens
        return name

    def fetch(self, name: str) -> KvBundle:
        from dora_rl.engine.kv_transfer.format import KvBundle

        try:
            found = ray.get(self._supervisor.take.remote(name), timeout=_PATIENCE)
            if not found:
                raise BundleError(f"the bundle '{name}' is gone")
            return KvBundle.from_bytes(memoryview(ray.get(found[0], timeout=_PATIENCE)))
        except ray.exceptions.RayError as error:
            raise BundleError(f"the bundle '{name}' is lost: {error}") from error


def _mapped(store: WeightStore, version: Version) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with store.path(version).open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
