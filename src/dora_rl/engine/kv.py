"""The memory of the KV cache, on the device and on the host.

Layout: [block, layer, key or value, token in block, kv head, head dim]. A block is contiguous, so one copy moves it to
the host, to another block or into a bundle.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dora_rl.core.errors import MemoryCapError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence


class KvShape(NamedTuple):
    """Dimensions of the KV of one token, and of a block."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @classmethod
    def of(cls, model: Any, block_size: int) -> KvShape:
        """Return the shape that a causal LM of `transformers` needs."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if not kinds <= {"full_attention", "sliding_attention"}:
            unsupported = ", ".join(sorted(kinds - {"full_attention", "sliding_attention"}))
            raise ModelError(f"the built-in engine does not serve models with {unsupported} layers")
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        dtype = str(model.dtype).removeprefix("torch.")
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(config.num_hidden_layers, kv_heads, head_dim, block_size, dtype)

    @property
    def block(self) -> tuple[int, ...]:
        return (self.layers, 2, self.block_size, self.kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return int(np.prod(self.block)) * size

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-tokens // self.block_size)


class KvCache:
    """All blocks of one engine, within a hard cap on memory."""

    def __init__(self, shape: KvShape, cap: int, device: torch.device) -> None:
        self.shape = shape
        count = cap // shape.block_bytes
        if count < 1:
            raise MemoryCapError(
                f"kv_bytes is {cap:,}, but one block of {shape.block_size} tokens takes {shape.block_bytes:,} bytes"
            )
        dtype = getattr(torch, shape.dtype)
        if device.type == "cpu":
            flat = torch.frombuffer(_lazy_memory(count * shape.block_bytes), dtype=torch.uint8)
            self.data = flat.view(dtype).view((count, *shape.block))
        else:
            self.data = torch.empty((count, *shape.block), dtype=dtype, device=device)

    @property
    def count(self) -> int:
        return len(self.data)

    def copy(self, source: int, target: int) -> None:
        """Copy one block into another."""
        _copy(self.data[source], self.data[target])

    def gather(self, blocks: Sequence[int], tokens: int, out: torch.Tensor) -> None:
        """Copy the first `tokens` tokens of these blocks into `out`, and fill the rest with zeros."""
        for index, block in enumerate(blocks):
            _copy(self.data[block], out[index])
        used = tokens % self.shape.block_size
        if used:
            out[len(blocks) - 1, :, :, used:].zero_()

    def scatter(self, source: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy host memory into these blocks."""
        for index, block in enumerate(blocks):
            _copy(source[index], self.data[block])

    def copy_all(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks within host memory."""
        _copy(source, target)

    def host(self, blocks: int) -> torch.Tensor:
        """Return host memory for this many blocks."""
        return torch.empty((blocks, *self.shape.block), dtype=self.data.dtype)

    def read(self, memory: memoryview | npt.NDArray[np.uint8], blocks: int) -> torch.Tensor:
        """Return a tensor over memory that holds blocks, for instance that of a bundle."""
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=blocks * self.shape.block_bytes)
        return flat.view(self.data.dtype).view((blocks, *self.shape.block))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy contiguous memory; on the CPU in this thread, since waking other threads costs more than it saves."""
    if source.device.type == target.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _lazy_memory(size: int) -> mmap.mmap:
    """Return memory that costs nothing before it is used, in large pages where the system has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    # Private: the system gives large pages and cheap first touches only to private memory.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Not every kernel supports them; this is a hint.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
