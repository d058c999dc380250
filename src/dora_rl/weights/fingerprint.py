"""What weights are called by their content.

A fingerprint is the SHA-256 over name, dtype, shape and the SHA-256 of the bytes of each tensor, in the order of
names. It does not depend on the file, on the order of publishing or on who computes it, so an instance can prove
what it serves from the tensors it really computes with.
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

_LITTLE = 8 << 20
"""Bytes that are hashed sooner than threads begin."""


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a tensor; a view where it is contiguous and in host memory."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy()


def digest(data: NDArray[np.uint8]) -> bytes:
    return hashlib.sha256(data.data).digest()


def combine(parts: Iterable[tuple[TensorSpec, bytes]]) -> Fingerprint:
    """The fingerprint of tensors, given their digests."""
    total = hashlib.sha256()
    for tensor, content in sorted(parts):
        shape = ",".join(map(str, tensor.shape))
        total.update(f"{tensor.name}|{tensor.dtype}|{shape}|".encode() + content)
    return total.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor], threads: int = 2) -> Fingerprint:
    """The fingerprint of these tensors as they are in memory now. Hashing releases the GIL, so threads help."""
    specs = [spec(name, tensor) for name, tensor in tensors.items()]
    if sum(tensor.nbytes for tensor in tensors.values()) < _LITTLE:
        return combine(zip(specs, (digest(raw(tensor)) for tensor in tensors.values()), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        return combine(zip(specs, pool.map(lambda tensor: digest(raw(tensor)), tensors.values()), strict=True))
