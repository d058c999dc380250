"""A published version as bytes in memory, wherever they came from.

Invariants:
- tensors are views of the bytes: nothing is copied, and they stay valid as long as one of them lives;
- the bytes may be read-only, so nobody may write into the tensors;
- bytes that are not a published version are refused by a typed error.
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
from dora_rl.weights.store import prove

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class WeightBuffer:
    """The bytes of a version; has what a lease has."""

    def __init__(self, version: Version, data: NDArray[np.uint8]) -> None:
        self._data = data
        self._layout = layout.read(version, data[: layout.header_end(data[:8].tobytes())].tobytes(), len(data))
        self.manifest: Manifest = self._layout.manifest

    def tensors(self) -> dict[str, Tensor]:
        """The weights, as views of the bytes."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the bytes can't be written to, which is as it should be
            whole = torch.from_numpy(self._data)
        return self._layout.views(whole)

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

    def __enter__(self) -> WeightBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        """Whoever has tensors holds the bytes."""
