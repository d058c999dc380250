"""A published version as bytes in memory, wherever they came from.

Invariants:
- tensors are views of the bytes: nothing is copied, and they stay valid as long as one of them lives;
- the bytes may be read-only, so nobody may write into the tensors;
- bytes that are not a published version are refused by a typed error.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dora_rl.core.errors import StoreError
from dora_rl.core.nouns import Fingerprint, Version
from dora_rl.models.dtypes import DTYPES
from dora_rl.weights.store import Manifest, prove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Parcel:
    """The bytes of a version; has what a lease has."""

    def __init__(self, version: Version, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._start, self._entries, said = _read(version, data)
        self.manifest = Manifest(version, str(said["fingerprint"]), said["adapter"] == "true", len(data))

    def tensors(self) -> dict[str, Tensor]:
        """The weights, as views of the bytes."""
        try:
            return {name: self._tensor(entry) for name, entry in self._entries.items()}
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StoreError(f"version {self.manifest.version} is damaged: {error}") from error

    def prove(self, served: dict[str, Tensor]) -> Fingerprint:
        """The fingerprint of the tensors that an instance really serves; another than the published one is an error."""
        return prove(self.manifest, served)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The bytes as a file, which is there meanwhile."""
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(self._data.data)
            file.flush()
            yield Path(file.name)

    def __enter__(self) -> Parcel:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever has tensors holds the bytes."""

    def _tensor(self, entry: dict[str, Any]) -> Tensor:
        begin, end = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if not 0 <= begin <= end <= len(self._data) - self._start:
            raise ValueError("a tensor lies outside of the bytes")
        if math.prod(shape) * dtype.itemsize != end - begin or any(size < 0 for size in shape):
            raise ValueError("a tensor has another size than its shape")
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        part = self._data[self._start + begin : self._start + end]
        if (self._start + begin) % dtype.itemsize:
            part = part.copy()  # after an odd number of smaller elements; rare, and small
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the bytes can't be written to, which is as it should be
            return torch.from_numpy(part).view(dtype).reshape(shape)


def _read(version: Version, data: NDArray[np.uint8]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Where the data start, the tensors' entries, and what the version says of itself."""
    try:
        size = int.from_bytes(data[:8].tobytes(), "little")
        if size > len(data) - 8:
            raise ValueError("its header is longer than it is")
        entries = json.loads(data[8 : 8 + size].tobytes())
        said = entries.pop("__metadata__")
        if int(said["version"]) != version:
            raise ValueError(f"it says that it is version {said['version']}")
        return 8 + size, entries, said
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"version {version} is damaged: its header can't be read ({error})") from error
