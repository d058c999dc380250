"""The byte layout of a published version: the header of a safetensors file, followed by the tensors.

Invariants:
- tensors are views of the bytes: nothing is copied, except a tensor that is not aligned for its dtype, and nothing else
  is kept;
- every number of the header is checked against the bytes before it is used; a contradiction is a `StoreError`.

The safetensors library is not used for the tensors: it leaks some dozens of bytes per tensor, and a run loads thousands
of versions.
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
    """The description that is stored with a published version."""

    version: Version
    fingerprint: Fingerprint
    adapter: bool
    """The tensors are a LoRA adapter, to be merged into the base weights."""
    bytes: int
    probe: Probe | None = None
    """The trainer's log-probs with these weights, if they were published."""


class Layout(NamedTuple):
    """The header of a version, parsed."""

    manifest: Manifest
    data_start: int
    """Offset of the first byte after the header."""
    entries: dict[str, dict[str, Any]]
    """dtype, shape and offsets of each tensor, by name."""

    def views(self, version_bytes: Tensor) -> dict[str, Tensor]:
        """The tensors, as views of all bytes of the version."""
        try:
            data = version_bytes[self.data_start :]
            return {name: _view(data, entry) for name, entry in self.entries.items()}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"version {self.manifest.version} is damaged: {error}") from error


def read(version: Version, start: bytes, size: int) -> Layout:
    """The layout of a version of `size` bytes; `start` are its first bytes, including the whole header."""
    try:
        end = header_end(start)
        if end > min(size, len(start)):
            raise ValueError("its header is longer than the file")
        entries = json.loads(start[8:end])
        metadata = entries.pop("__metadata__")
        if int(metadata["version"]) != version:
            raise ValueError(f"its header has version {metadata['version']}")
        probe = Probe.decode(metadata["probe"]) if "probe" in metadata else None
        manifest = Manifest(version, str(metadata["fingerprint"]), metadata["adapter"] == "true", size, probe)
        return Layout(manifest, end, entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"version {version} is damaged: its header can't be read ({error})") from error


def header_end(start: bytes) -> int:
    """The offset at which the header ends, from the first eight bytes."""
    return 8 + int.from_bytes(start[:8], "little")


def _view(data: Tensor, entry: dict[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor is outside of the data")
    if math.prod(shape) * dtype.itemsize != end - begin or any(size < 0 for size in shape):
        raise ValueError("the number of bytes of a tensor does not match its shape")
    values = data[begin:end]
    if values.storage_offset() % dtype.itemsize:
        values = values.clone()  # it follows an odd number of smaller elements; such tensors are rare and small
    return values.view(dtype).view(shape)
