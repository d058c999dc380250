"""A published version as bytes in memory, for instance from an object store.

Invariants:
- tensors are views of the bytes: nothing is copied, and the bytes exist as long as one of the tensors does;
- the bytes may be read-only, so no code may write to the tensors;
- bytes that are not a published version are refused with a `StoreError`.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dora_rl.core.types import Fingerprint, Version
from dora_rl.weights import layout
from dora_rl.weights.layout import Manifest
from dora_rl.weights.store import verify

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class WeightBuffer:
    """The bytes of a version, with the interface of a lease."""

    def __init__(self, version: Version, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._layout = layout.read(version, data[: layout.header_end(data[:8].tobytes())].tobytes(), len(data))
        self.manifest: Manifest = self._layout.manifest

    def tensors(self) -> dict[str, Tensor]:
        """The weights, as views of the bytes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the warning that the bytes are read-only, as intended
            data = torch.from_numpy(self._data)
        return self._layout.views(data)

    def verify(self, served: dict[str, Tensor]) -> Fingerprint:
        """The fingerprint of the tensors that an instance serves; another than the published one is an error."""
        return verify(self.manifest, served)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The bytes as a temporary file."""
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(self._data.data)
            file.flush()
            yield Path(file.name)

    def __enter__(self) -> WeightBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to release: the tensors keep the bytes alive."""
