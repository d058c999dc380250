"""Which block of the KV cache belongs to whom.

Invariants:
- a block is free, or has at least one holder; the two add up to all blocks, always;
- a block is written only while it has exactly one holder; whoever would write into a shared one copies it first;
- blocks are handed out lowest id first, so runs repeat.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Reference counts over a fixed number of blocks."""

    def __init__(self, count: int) -> None:
        self.holders = np.zeros(count, dtype=np.int32)
        """How many hold each block."""
        self._free = list(range(count))

    @property
    def count(self) -> int:
        return len(self.holders)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block, held once. There must be one."""
        block = heapq.heappop(self._free)
        assert self.holders[block] == 0, f"block {block} was free and held"
        self.holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            assert self.holders[block] > 0, f"block {block} is free and can't be shared"
            self.holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each; what nobody holds is free."""
        for block in blocks:
            assert self.holders[block] > 0, f"block {block} was released twice"
            self.holders[block] -= 1
            if self.holders[block] == 0:
                heapq.heappush(self._free, block)

    def check(self) -> None:
        """Every block is accounted for."""
        held = int((self.holders > 0).sum())
        assert held + self.free == self.count, f"{held} blocks held and {self.free} free of {self.count}"
