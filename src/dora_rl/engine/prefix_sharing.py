"""Prompts that several waiting requests have in common: computed once, by the first of them, then shared.

Invariants:
- an entry is keyed by slot, by how often that slot has been loaded, and by the tokens, so nothing computed under other
  weights is ever found;
- an entry lives while a request with its prompt waits; it holds the prompt's blocks from when they are computed.
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
    """Experts are recorded: those who want them share with each other only."""
    tokens: tuple[int, ...]


class SharedPrefix:
    """One prompt and who waits for it."""

    __slots__ = ("blocks", "donor", "experts", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        """Requests that have not started yet."""
        self.donor: Sequence | None = None
        """Computes the prompt now."""
        self.blocks: list[int] | None = None
        """Held here once computed."""
        self.experts: Any = None
        """Those that the prompt's tokens went through, if recorded."""


class PrefixSharing:
    """All prompts that somebody waits for."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[PrefixKey, SharedPrefix] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def join(self, key: PrefixKey) -> None:
        """One more request waits with this prompt."""
        self._entries.setdefault(key, SharedPrefix()).waiting += 1

    def leave(self, key: PrefixKey) -> None:
        """A request with this prompt has started or is gone."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.waiting -= 1
        if entry.waiting <= 0:
            self._drop(key, entry)

    def busy(self, key: PrefixKey) -> bool:
        """Somebody is computing it: waiting for that is cheaper than computing it twice."""
        entry = self._entries.get(key)
        return entry is not None and entry.donor is not None and entry.blocks is None

    def blocks(self, key: PrefixKey) -> list[int] | None:
        """The computed prompt's blocks, if they are there."""
        entry = self._entries.get(key)
        return None if entry is None else entry.blocks

    def experts(self, key: PrefixKey) -> Any:
        """The experts of the computed prompt, if recorded."""
        entry = self._entries.get(key)
        return None if entry is None else entry.experts

    def begin(self, key: PrefixKey, donor: Sequence) -> None:
        """This request computes the prompt for all."""
        entry = self._entries.get(key)
        if entry is not None and entry.blocks is None:
            entry.donor = donor

    def computed(self, key: PrefixKey, donor: Sequence, blocks: list[int]) -> None:
        """The donor has computed the prompt: hold its blocks for those who wait."""
        entry = self._entries.get(key)
        if entry is not None and entry.donor is donor and entry.blocks is None:
            self._pool.share(blocks)
            entry.blocks = blocks
            entry.experts = donor.prompt_experts
            entry.donor = None

    def lost(self, key: PrefixKey, donor: Sequence) -> None:
        """The donor went before it was done: the next one computes the prompt."""
        entry = self._entries.get(key)
        if entry is not None and entry.donor is donor:
            entry.donor = None

    def let_go(self) -> bool:
        """Give the blocks of one computed prompt back, for want of memory; those who wait compute it again."""
        for entry in self._entries.values():
            if entry.blocks is not None:
                self._pool.release(entry.blocks)
                entry.blocks = None
                return True
        return False

    def held(self) -> list[list[int]]:
        """The blocks held here, prompt by prompt."""
        return [entry.blocks for entry in self._entries.values() if entry.blocks is not None]

    def _drop(self, key: PrefixKey, entry: SharedPrefix) -> None:
        if entry.blocks is not None:
            self._pool.release(entry.blocks)
        del self._entries[key]
