"""Prompts that several waiting requests have in common: the first of them computes the prompt, the others share it.

Invariants:
- an entry is keyed by slot, by the number of loads of that slot, and by the tokens, so KV that was computed with other
  weights is never found;
- an entry exists while a request with its prompt waits; it holds the prompt's blocks once they are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dora_rl.engine.blocks import BlockPool
    from dora_rl.engine.sequence import Sequence


class PrefixKey(NamedTuple):
    """Which prompt, under which weights."""

    slot: int
    load: int
    records: bool
    """Experts are recorded; such requests share only with each other."""
    tokens: tuple[int, ...]


class SharedPrefix:
    """One prompt, and the requests that wait for it."""

    __slots__ = ("blocks", "donor", "experts", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        """Number of requests that have not started yet."""
        self.donor: Sequence | None = None
        """The sequence that computes the prompt now."""
        self.blocks: list[int] | None = None
        """Blocks of the computed prompt, held by this entry."""
        self.experts: Any = None
        """Experts of the prompt's tokens, if recorded."""


class PrefixSharing:
    """All prompts that requests wait for."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[PrefixKey, SharedPrefix] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, key: PrefixKey) -> None:
        """Count one more waiting request with this prompt."""
        self._entries.setdefault(key, SharedPrefix()).waiting += 1

    def leave(self, key: PrefixKey) -> None:
        """Count one less: a request with this prompt has started or is gone."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.waiting -= 1
        if entry.waiting <= 0:
            self._drop(key, entry)

    def busy(self, key: PrefixKey) -> bool:
        """Return whether a sequence computes the prompt now: waiting for it is cheaper than computing it twice."""
        entry = self._entries.get(key)
        return entry is not None and entry.donor is not None and entry.blocks is None

    def blocks(self, key: PrefixKey) -> list[int] | None:
        """Return the blocks of the computed prompt, if it is computed."""
        entry = self._entries.get(key)
        return None if entry is None else entry.blocks

    def experts(self, key: PrefixKey) -> Any:
        """Return the experts of the computed prompt, if recorded."""
        entry = self._entries.get(key)
        return None if entry is None else entry.experts

    def begin(self, key: PrefixKey, donor: Sequence) -> None:
        """Let this sequence compute the prompt for all."""
        entry = self._entries.get(key)
        if entry is not None and entry.blocks is None:
            entry.donor = donor

    def computed(self, key: PrefixKey, donor: Sequence, blocks: list[int]) -> None:
        """Hold the blocks of the prompt, which its donor has computed, for the waiting requests."""
        entry = self._entries.get(key)
        if entry is not None and entry.donor is donor and entry.blocks is None:
            self._pool.share(blocks)
            entry.blocks = blocks
            entry.experts = donor.prompt_experts
            entry.donor = None

    def lost(self, key: PrefixKey, donor: Sequence) -> None:
        """Forget a donor that left before it was done; the next request computes the prompt."""
        entry = self._entries.get(key)
        if entry is not None and entry.donor is donor:
            entry.donor = None

    def release_one(self) -> bool:
        """Release the blocks of one computed prompt, to free memory; waiting requests compute it again."""
        for entry in self._entries.values():
            if entry.blocks is not None:
                self._pool.release(entry.blocks)
                entry.blocks = None
                return True
        return False

    def held(self) -> list[list[int]]:
        """Return the held blocks of each prompt."""
        return [entry.blocks for entry in self._entries.values() if entry.blocks is not None]

    def _drop(self, key: PrefixKey, entry: SharedPrefix) -> None:
        if entry.blocks is not None:
            self._pool.release(entry.blocks)
        del self._entries[key]
