"""Reference counts of the blocks of the KV cache.

Invariants:
- a block is free or has at least one holder, and free and held blocks always add up to all blocks;
- a block is written only while it has exactly one holder; a shared block is copied before the write;
- the free block with the lowest id is handed out first, so runs are repeatable.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Reference counts over a fixed number of blocks."""

    def __init__(self, count: int) -> None:
        self.holders = np.zeros(count, dtype=np.int32)
        """Number of holders of each block."""
        self._free = list(range(count))

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.holders)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self) -> int:
        """Return a free block, now with one holder. There must be one."""
        block = heapq.heappop(self._free)
        assert self.holders[block] == 0, f"block {block} is both free and held"
        self.holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            assert self.holders[block] > 0, f"block {block} is free and can't be shared"
            self.holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block; a block without holders is free."""
        for block in blocks:
            assert self.holders[block] > 0, f"block {block} was released twice"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                heapq.heappush(self._free, block)

    def check(self) -> None:
        """Assert that every block is accounted for."""
        held = int((self.holders > 0).sum())
        assert held + self.free == self.count, f"{held} blocks held and {self.free} free of {self.count}"
