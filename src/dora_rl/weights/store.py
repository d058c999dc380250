"""The weight store: one safetensors file per version, in shared memory or in a folder.

Invariants:
- a file under its final name is complete: it is written under another name, and renamed after its last byte;
- the header has version and fingerprint, so a file identifies itself;
- loading maps the file and copies nothing: all processes of a machine share one set of pages;
- a leased version is never freed. A lease is an operating-system lock on a separate file, so it ends with its process,
  in whatever way that ends;
- only the newest `keep` versions, and older ones that are still leased, take space.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_rl.core.durable_files import sync
from dora_rl.core.errors import FingerprintError, StoreError
from dora_rl.core.interfaces import TensorSpec
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version
from dora_rl.models.dtypes import DTYPES
from dora_rl.models.fingerprint import combine, digest, fingerprint, raw
from dora_rl.weights import layout
from dora_rl.weights.layout import Manifest

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"v(\d{8})\.safetensors")
_ALIGNMENT = 64  # of the data, in bytes: a cache line, so that mapped tensors are as fast as allocated ones
_UNSET = "0" * 64
_STAGED = ".staged-"


class Lease:
    """Keeps a version from being freed until it is closed; maps the weights on demand."""

    def __init__(self, store: WeightStore, manifest: Manifest, lock: int, path: Path) -> None:
        self.manifest = manifest
        self._store = store
        self._lock: int | None = lock
        self._path = path

    def tensors(self) -> dict[str, Tensor]:
        """The weights, mapped from the store; they stay valid after the lease is closed."""
        version = self.manifest.version
        try:
            data = _mapped(self._store.path(version))
        except (OSError, RuntimeError) as error:
            raise StoreError(f"version {version} can't be mapped: {error}") from error
        end = layout.header_end(data[:8].numpy().tobytes())
        return layout.read(version, data[:end].numpy().tobytes(), len(data)).views(data)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The file of the version, which exists at least as long as the lease."""
        yield self._store.path(self.manifest.version).resolve()

    def verify(self, served: dict[str, Tensor]) -> Fingerprint:
        """The fingerprint of the tensors that an instance serves; another than the published one is an error."""
        return verify(self.manifest, served)

    def close(self) -> None:
        """Release the version. If it is not among the newest `keep` versions, the last release frees it."""
        if self._lock is None:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = None
        self._store.prune()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WeightStore:
    """Published versions in one folder. Any process of the machine may open the same folder."""

    def __init__(self, folder: Path, *, keep: int, durable: bool = False) -> None:
        assert keep >= 1
        self._folder = folder
        self._keep = keep
        self._durable = durable
        (folder / "leases").mkdir(parents=True, exist_ok=True)

    @classmethod
    def in_shared_memory(cls, run: str, *, keep: int) -> WeightStore:
        """A store in the memory of this machine, which exists until it is cleared or the machine restarts."""
        return cls(Path("/dev/shm") / f"dora-rl-{run}", keep=keep)  # noqa: S108

    def path(self, version: Version) -> Path:
        return self._folder / f"v{version:08d}.safetensors"

    def versions(self) -> list[Version]:
        """All published versions, oldest first."""
        names = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def publish(
        self,
        version: Version,
        specs: Sequence[TensorSpec],
        tensors: Iterable[Tensor],
        *,
        adapter: bool = False,
        write: bool = True,
        probe: Probe | None = None,
    ) -> Fingerprint:
        """Write a version and rename it into place; older versions beyond the newest `keep` are freed unless leased.

        Ranks of a sharded trainer that do not write (`write=False`) take part in gathering the tensors, but do not wait
        until the version is published: they learn of it from rank 0.
        """
        if not write:
            deque(tensors, maxlen=0)
            return ""
        staged = self._folder / f"{_STAGED}{uuid.uuid4().hex}"
        try:
            found = _write(staged, version, specs, tensors, adapter, self._durable, probe)
            with self._locked():
                if version in self.versions():
                    self._check_same(version, found)  # a restarted trainer publishes its version again
                else:
                    staged.rename(self.path(version))
        finally:
            staged.unlink(missing_ok=True)
        if self._durable:
            sync(self._folder)
        self.prune()
        return found

    def manifest(self, version: Version) -> Manifest:
        try:
            with self.path(version).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                start += file.read(min(size, layout.header_end(start)))
        except FileNotFoundError:
            there = ", ".join(map(str, self.versions())) or "none"
            raise StoreError(f"version {version} is not in the store, which has: {there}") from None
        return layout.read(version, start, size).manifest

    def lease(self, version: Version) -> Lease:
        """Take a lease on a version; a version that is not in the store is a `StoreError`."""
        path = self._folder / "leases" / f"{version:08d}-{uuid.uuid4().hex}"
        with self._locked():
            manifest = self.manifest(version)
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return Lease(self, manifest, lock, path)

    def holders(self, version: Version) -> int:
        """The number of leases on a version. Leases of dead processes are removed."""
        with self._locked():
            return self._holders(version)

    def retire(self, version: Version) -> None:
        """Free a version; if it is leased, that is a `StoreError`."""
        with self._locked():
            self.manifest(version)
            held = self._holders(version)
            if held:
                raise StoreError(f"version {version} can't be retired: it has {held} lease{'s' if held > 1 else ''}")
            self.path(version).unlink()

    def prune(self) -> list[Version]:
        """Free versions beyond the newest `keep` that are not leased; returns the freed versions."""
        with self._locked():
            freed = [version for version in self.versions()[: -self._keep] if not self._holders(version)]
            for version in freed:
                self.path(version).unlink()
        return freed

    def sweep(self) -> None:
        """Remove the partial files of publishers that were killed; call it only while no process publishes."""
        for path in self._folder.glob(f"{_STAGED}*"):
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the store. Mapped tensors stay valid."""
        import shutil

        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_same(self, version: Version, found: Fingerprint) -> None:
        published = self.manifest(version).fingerprint
        if published != found:
            raise FingerprintError(
                f"version {version} is already published with the fingerprint {published[:16]}, "
                f"and can't be replaced by {found[:16]}"
            )

    def _holders(self, version: Version) -> int:
        alive = 0
        for path in (self._folder / "leases").glob(f"{version:08d}-*"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    alive += 1
                else:
                    path.unlink(missing_ok=True)
        return alive

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A lock over all processes: one change of the store at a time."""
        with (self._folder / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def verify(manifest: Manifest, served: dict[str, Tensor]) -> Fingerprint:
    """The fingerprint of tensors, which must be the published one: otherwise it is a `FingerprintError`."""
    found = fingerprint(served)
    if found != manifest.fingerprint:
        raise FingerprintError(
            f"version {manifest.version} was published with the fingerprint {manifest.fingerprint[:16]}, "
            f"but the served tensors have {found[:16]}"
        )
    return found


def _write(
    path: Path,
    version: Version,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Tensor],
    adapter: bool,
    durable: bool,
    probe: Probe | None,
) -> Fingerprint:
    """Copy each tensor once, directly into the mapped file. Threads hash tensors while others are being copied."""
    metadata = {"format": "pt", "version": str(version), "adapter": str(adapter).lower(), "fingerprint": _UNSET}
    if probe is not None:
        metadata["probe"] = probe.encode()
    header, spans, size = _header(specs, metadata)
    with path.open("w+b") as file, ThreadPoolExecutor(2) as pool:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk or /dev/shm is an error here, not a crash later
        with mmap.mmap(file.fileno(), size) as memory:
            target = np.frombuffer(memory, dtype=np.uint8)
            try:
                digests: list[Future[bytes]] = []
                for tensor, (begin, end) in zip(tensors, spans, strict=True):
                    span = target[begin:end]
                    span[:] = raw(tensor)
                    digests.append(pool.submit(digest, span))
                found = combine(zip(specs, [future.result() for future in digests], strict=True))
                final = header.replace(_UNSET.encode(), found.encode())
                target[: len(final)] = np.frombuffer(final, dtype=np.uint8)
            finally:
                pool.shutdown()
                digests.clear()
                span = target = np.empty(0, dtype=np.uint8)  # a mapping can't be closed while it has views
            if durable:
                memory.flush()
        if durable:
            os.fsync(file.fileno())
    return found


def _mapped(path: Path) -> Tensor:
    """The bytes of a file, memory-mapped."""
    import torch

    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]


def _header(specs: Sequence[TensorSpec], metadata: dict[str, str]) -> tuple[bytes, list[tuple[int, int]], int]:
    """The header of a safetensors file (length and JSON), the span of each tensor in the file, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    spans, offset = [], 0
    for tensor in specs:
        size = int(np.prod(tensor.shape, dtype=np.int64)) * DTYPES[tensor.dtype].itemsize
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        spans.append((offset, offset + size))
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [(a + start, b + start) for a, b in spans], start + offset
