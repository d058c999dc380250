"""The inputs of the kernels, as the engine lays them out in memory. The kernels need nothing else of the engine.

All arrays are contiguous. Field names and dtypes are those of the structs in interface.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


class CacheShape(Protocol):
    """Dimensions of a KV cache."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class PagedCache(Protocol):
    """A KV cache, [block, layer, key or value, token in block, kv head, head dim] in float32."""

    data: torch.Tensor

    @property
    def shape(self) -> CacheShape: ...


class TokenRows(Protocol):
    """The tokens of one forward pass."""

    count: int
    logit_count: int
    token: Longs
    position: Ints
    sequence: Ints
    logit_row: Ints
    table: Ints


class DecodeRows(Protocol):
    """The rows of a batch, as columns; `settings` has the columns of `binding.SAMPLING_COLUMNS`."""

    token: Longs
    position: Ints
    fill: Ints
    last: Ints
    response_index: Unsigned
    stops: Longs
    history: Longs
    logprobs: Floats
    model_logprobs: Floats

    @property
    def rows(self) -> TokenRows: ...

    @property
    def settings(self) -> Any: ...
