"""Published versions as an engine loads them: mapped from the store, with a LoRA adapter merged into the base weights.

A version is leased while it is read. Mapped tensors stay valid after their file is deleted, so the weights that an
engine serves can't disappear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from dora_rl.core.errors import StoreError, VersionError
from dora_rl.core.interfaces import PublishedFile
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version
from dora_rl.models import lora
from dora_rl.trainer.config import LoraConfig
from dora_rl.weights.layout import Manifest


class Leased(Protocol):
    """A version that is not freed while it is read."""

    manifest: Manifest

    def tensors(self) -> dict[str, Any]: ...

    def verify(self, served: dict[str, Any]) -> Fingerprint: ...

    def file(self) -> AbstractContextManager[Path]:
        """The version as a safetensors file, for engines that read files themselves."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class Leasing(Protocol):
    """Hands out leases on versions: a weight store, or its replacement on another machine."""

    def lease(self, version: Version) -> Leased:
        """Hold a version; raises a `StoreError` if it is not there."""
        ...


class StoreWeights:
    """Published versions as tensors, the source of our own engine."""

    def __init__(self, store: Leasing, model: Any, lora_config: LoraConfig | None) -> None:
        self._store = store
        self._lora = lora_config
        self._base: dict[str, Any] = {}
        self._transposed: set[str] = set()
        if lora_config is not None:
            self._transposed = lora.transposed(model)
            self._base = dict(lora.base_weights(model))

    def tensors(self, version: Version) -> Mapping[str, Any]:
        """The tensors of a version."""
        with _lease(self._store, version) as lease:
            tensors = lease.tensors()
            return self._merge(tensors) if lease.manifest.adapter else tensors

    def fingerprint(self, version: Version) -> Fingerprint:
        """Computed from the tensors in the store, not read from the manifest."""
        with _lease(self._store, version) as lease:
            return lease.verify(lease.tensors())

    def probe(self, version: Version) -> Probe | None:
        """The probe that the trainer published with the version."""
        with _lease(self._store, version) as lease:
            return lease.manifest.probe

    def _merge(self, adapter: Mapping[str, Any]) -> dict[str, Any]:
        assert self._lora is not None, "an adapter was published, but the run trains all weights"
        return dict(lora.merge(self._base.items(), adapter, scale=self._lora.scale, transposed=self._transposed))


class StoreFiles:
    """Published versions as files, the source of an engine that reads files itself."""

    def __init__(self, store: Leasing) -> None:
        self._store = store

    @contextmanager
    def hold(self, version: Version) -> Iterator[PublishedFile]:
        """The file of a version, leased meanwhile, with its fingerprint computed from the tensors."""
        with _lease(self._store, version) as lease, lease.file() as path:
            manifest = lease.manifest
            yield PublishedFile(path, lease.verify(lease.tensors()), manifest.adapter, manifest.probe)


def _lease(store: Leasing, version: Version) -> Leased:
    try:
        return store.lease(version)
    except StoreError as error:
        raise VersionError(str(error)) from error
