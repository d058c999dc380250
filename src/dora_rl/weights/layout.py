"""How a published version lies in bytes: the header of a safetensors file, and tensors as views behind it.

Invariants:
- tensors are views of the bytes: nothing is copied (but one that lies askew for its type), nothing is kept otherwise;
- every number of the header is checked against the bytes before it is used; what does not fit is a `StoreError`.

The library is not asked for the tensors: each that it gives costs some dozens of bytes for ever, and a run loads
thousands of versions.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from dora_rl.core.errors import StoreError
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version
from dora_rl.models.dtypes import DTYPES

if TYPE_CHECKING:
    from torch import Tensor


class Manifest(NamedTuple):
    """What a published version says of itself."""

    version: Version
    fingerprint: Fingerprint
    adapter: bool
    """The tensors are a LoRA adapter, to be put over the base weights."""
    bytes: int
    probe: Probe | None = None
    """What the trainer computed with these weights; None: it did not say."""


class Layout(NamedTuple):
    """What stands where."""

    manifest: Manifest
    begin: int
    """Of the data."""
    entries: dict[str, dict[str, Any]]

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors, of all the bytes."""
        try:
            data = whole[self.begin :]
            return {name: _view(data, entry) for name, entry in self.entries.items()}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"version {self.manifest.version} is damaged: {error}") from error


def read(version: Version, start: bytes, size: int) -> Layout:
    """The layout of a version of so many bytes, from as many of them as hold its header."""
    try:
        begin = header_end(start)
        if begin > min(size, len(start)):
            raise ValueError("its header is longer than it is")
        entries = json.loads(start[8:begin])
        said = entries.pop("__metadata__")
        if int(said["version"]) != version:
            raise ValueError(f"it says that it is version {said['version']}")
        probe = Probe.decode(said["probe"]) if "probe" in said else None
        manifest = Manifest(version, str(said["fingerprint"]), said["adapter"] == "true", size, probe)
        return Layout(manifest, begin, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"version {version} is damaged: its header can't be read ({error})") from error


def header_end(start: bytes) -> int:
    """Where the header ends, from the first eight bytes."""
    return 8 + int.from_bytes(start[:8], "little")


def _view(data: Tensor, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor lies outside of the bytes")
    if math.prod(shape) * dtype.itemsize != end - begin or any(size < 0 for size in shape):
        raise ValueError("a tensor has another size than its shape")
    part = data[begin:end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()  # behind an odd number of smaller elements; rare, and small
    return part.view(dtype).view(shape)
