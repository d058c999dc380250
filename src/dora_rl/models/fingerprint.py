"""The fingerprint of weights: a hash of their content.

A fingerprint is the SHA-256 over the name, dtype, shape and SHA-256 of the bytes of each tensor, sorted by name. It
does not depend on the file, on the order of publishing or on the process that computes it, so an instance can verify
the weights that it serves by hashing the tensors that it computes with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dora_rl.core.interfaces import TensorSpec
from dora_rl.core.types import Fingerprint
from dora_rl.models.dtypes import spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SMALL_BYTES = 8 << 20
"""Less than this is hashed faster than threads start."""


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor; a view where it is contiguous and in host memory."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy()


def digest(data: NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


def combine(digests: Iterable[tuple[TensorSpec, bytes]]) -> Fingerprint:
    """The fingerprint of tensors, from the digest of each."""
    total = hashlib.sha256()
    for tensor, content in sorted(digests):
        shape = ",".join(map(str, tensor.shape))
        total.update(f"{tensor.name}|{tensor.dtype}|{shape}|".encode() + content)
    return total.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor], threads: int = 2) -> Fingerprint:
    """The fingerprint of the current content of these tensors. Hashing releases the GIL, so threads help."""
    specs = [spec(name, tensor) for name, tensor in tensors.items()]
    if sum(tensor.nbytes for tensor in tensors.values()) < _SMALL_BYTES:
        return combine(zip(specs, (digest(raw(tensor)) for tensor in tensors.values()), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        return combine(zip(specs, pool.map(lambda tensor: digest(raw(tensor)), tensors.values()), strict=True))
