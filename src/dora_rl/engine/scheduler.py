"""Decides which requests run in the next step, and in which blocks.

    waiting --admit--> running --finish, abort, export--> gone
                      |   ^   |
                pre-empt  |  park            (KV goes to host memory; it is dropped only when that is full)
                      v return v
                    swapped <- parked

Invariants:
- at most `max_requests` run, over all slots; the blocks in use never exceed the pool, the swapped KV never its cap;
- a parked request rests: it keeps its blocks until other requests need them, and only then its KV goes to the host;
- the oldest running request can always continue: it may take the blocks of every newer one, and a request that does not
  fit alone is never accepted;
- swapped requests return before waiting ones are admitted;
- requests are served in order of arrival, so runs are repeatable.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

import numpy as np

from dora_rl.engine.blocks import BlockPool
from dora_rl.engine.prefix_sharing import PrefixKey, PrefixSharing
from dora_rl.engine.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from dora_rl.core.tokens import TokenChunk
    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.kv import KvCache
    from dora_rl.engine.sequence import Sequence


class Scheduler:
    """Requests and blocks of one engine."""

    def __init__(
        self,
        cache: KvCache,
        batches: list[DecodeBatch],
        config: EngineConfig,
        report: Callable[[TokenChunk], None],
    ) -> None:
        self.cache = cache
        self.pool = BlockPool(cache.count)
        self.prompts = PrefixSharing(self.pool)
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.parked: list[Sequence] = []
        """Requests that wait for their environments."""
        self.stats = Stats()
        self.host_used = 0
        self.preempted = False
        """Whether a request was pre-empted since this was last cleared."""
        self.loads = [0] * len(batches)
        """Number of loads of each slot."""
        self._resting = np.zeros_like(self.pool.holders)
        """Number of holders of each block that rest: they are parked or swapped, and still have blocks."""
        self._batches = batches
        self._config = config
        self._report = report

    # Arrival and departure of requests.

    def enqueue(self, sequence: Sequence) -> None:
        """Let a request wait for room."""
        insort(self.waiting, sequence, key=lambda other: other.arrival)
        self.prompts.join(self._key(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forget a request in any state; a running one must have been flushed."""
        if sequence.row >= 0:
            self._batches[sequence.slot].remove(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
            self._stop_resting(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
            self._stop_resting(sequence)
        else:
            self.waiting.remove(sequence)
            self.prompts.leave(self._key(sequence))
        self._release(sequence)

    def flush(self, sequence: Sequence) -> None:
        """Report the tokens that a running sequence has sampled so far."""
        if sequence.row >= 0:
            chunk = self._batches[sequence.slot].flush(sequence)
            if chunk is not None:
                self._report(chunk)

    def requeue(self, sequence: Sequence) -> None:
        """Put a request back among the waiting ones, without KV."""
        self.flush(sequence)
        self.drop(sequence)
        sequence.forget_kv()
        self.enqueue(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Accept a sequence that arrives with its KV in `host`: run it, keep it on the host, or drop the KV."""
        assert sequence.host is not None
        if self._can_return(sequence):
            self._return(sequence)
        elif self.host_used + sequence.host.nbytes <= self._config.host_bytes:
            self.host_used += sequence.host.nbytes
            insort(self.swapped, sequence, key=lambda other: other.arrival)
        else:
            self.stats.recomputed += 1
            sequence.forget_kv()
            self.enqueue(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take a request out of the batch until `wake`."""
        if sequence.row >= 0:
            self.flush(sequence)
            self._batches[sequence.slot].remove(sequence)
            self._rest(sequence)
        elif sequence.host is not None:  # it has arrived from another engine
            if self.host_used + sequence.host.nbytes > self._config.host_bytes:
                self.stats.recomputed += 1
                sequence.forget_kv()
            else:
                self.host_used += sequence.host.nbytes
        self.parked.append(sequence)

    def wake(self, sequence: Sequence) -> None:
        """Resume a parked request."""
        self.parked.remove(sequence)
        if sequence.host is None and not sequence.blocks:
            self.enqueue(sequence)
        else:
            insort(self.swapped, sequence, key=lambda other: other.arrival)

    @property
    def running(self) -> int:
        return sum(len(batch) for batch in self._batches)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the blocks in use; blocks that only resting requests hold count as free."""
        return int(np.count_nonzero(self.pool.holders > self._resting)) * self.cache.shape.block_size

    # The plan of one step.

    def plan(self) -> list[list[tuple[Sequence, int]]]:
        """Give decoding rows their blocks, bring back and admit requests; return the prefill chunks of each slot."""
        self._extend_all()
        before = self.running
        while self.swapped and self._can_return(self.swapped[0]):
            sequence = self.swapped.pop(0)
            if sequence.host is not None:
                self.host_used -= sequence.host.nbytes
            self._return(sequence)
        if not self.swapped:
            self._admit()
        if self.running != before:
            self._extend_all()
        return self._chunks()

    def _extend_all(self) -> None:
        for batch in self._batches:
            self._extend(batch)

    def _extend(self, batch: DecodeBatch) -> None:
        """Give every decoding row a block that only it holds to write into."""
        size = self.cache.shape.block_size
        rows = batch.decode_rows()
        position = batch.position[rows]
        held = self.pool.holders[batch.rows.table[rows, position // size]]
        lacking = rows[(position % size == 0) | (held > 1)]
        for sequence in [batch.sequences[row] for row in lacking]:
            if sequence.row < 0:
                continue
            # A plan may come here twice, and blocks may have been taken ahead, so the block may exist already.
            index = int(batch.position[sequence.row]) // size
            missing = index == len(sequence.blocks)
            if not missing and self.pool.holders[sequence.blocks[index]] == 1:
                continue
            if not self._room(1, sequence):
                continue
            if missing:
                sequence.blocks.append(self.pool.take())
            elif self.pool.holders[sequence.blocks[index]] > 1:
                self._copy_shared(sequence, index)
            batch.set_blocks(sequence)

    def look_ahead(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int) -> bool:
        """Take blocks for `steps` tokens of these decoding rows; return False if that would pre-empt a request."""
        end = np.minimum(batch.position[rows] + steps - 1, batch.last[rows] - 1)
        needed = end // self.cache.shape.block_size + 1 - batch.held[rows]
        lacking = needed > 0
        if not self._free_resting(int(needed[lacking].sum()) + self.running):
            return False
        for row, count in zip(rows[lacking].tolist(), needed[lacking].tolist(), strict=True):
            sequence = batch.sequences[row]
            sequence.blocks.extend(self.pool.take() for _ in range(count))
            batch.set_blocks(sequence)
        return True

    def catch_up(self, batch: DecodeBatch) -> bool:
        """Give blocks to rows that began to decode after the plan; return False if too few blocks are free."""
        if not self._free_resting(self.running):
            return False
        self._extend(batch)
        return True

    def _copy_shared(self, sequence: Sequence, index: int) -> None:
        """Copy on write: replace a shared block of a sequence by a copy."""
        shared = sequence.blocks[index]
        sequence.blocks[index] = self.pool.take()
        self.cache.copy(shared, sequence.blocks[index])
        self.pool.release([shared])
        self.stats.copied_blocks += 1

    def _admit(self) -> None:
        """Start waiting requests, in order, while there are rows and blocks for their prompts."""
        left: list[Sequence] = []
        for index, sequence in enumerate(self.waiting):
            if self.running >= self._config.max_requests:
                left += self.waiting[index:]
                break
            key = self._key(sequence)
            if self.prompts.busy(key):
                left.append(sequence)
                continue
            shared = self.prompts.blocks(key)
            needed = self.cache.shape.blocks(sequence.length) - (len(shared) if shared else 0) + 1
            if not self._spare(needed):
                left += self.waiting[index:]
                break
            # Making room may have released the shared prompt itself.
            self._start(sequence, key, self.prompts.blocks(key))
        self.waiting = left

    def _start(self, sequence: Sequence, key: PrefixKey, shared: list[int] | None) -> None:
        if shared:
            self.pool.share(shared)
            sequence.blocks = list(shared)
            sequence.computed = sequence.prompt_length - 1
            sequence.prompt_experts = self.prompts.experts(key)
            self.stats.shared += sequence.computed
        else:
            self.prompts.begin(key, sequence)
        self.prompts.leave(key)
        self._batches[sequence.slot].add(sequence)

    def _chunks(self) -> list[list[tuple[Sequence, int]]]:
        """Choose the prompt tokens that this step computes, oldest request first."""
        budget = self._config.prefill_chunk
        chunks: list[list[tuple[Sequence, int]]] = [[] for _ in self._batches]
        prefilling = [sequence for batch in self._batches for sequence in batch.sequences[batch.decoding :]]
        for sequence in sorted(prefilling, key=lambda one: one.arrival):
            if sequence.row < 0 or budget <= 0:
                continue
            count = min(budget, sequence.length - sequence.computed)
            needed = self.cache.shape.blocks(sequence.computed + count) - len(sequence.blocks)
            shared = bool(sequence.blocks) and self._last_is_shared(sequence)
            if not self._room(needed + shared, sequence):
                continue
            if shared:
                self._copy_shared(sequence, len(sequence.blocks) - 1)
            sequence.blocks.extend(self.pool.take() for _ in range(needed))
            self._batches[sequence.slot].set_blocks(sequence)
            chunks[sequence.slot].append((sequence, count))
            budget -= count
        # Making room for one request may have pre-empted another that already had its chunk.
        return [[(sequence, count) for sequence, count in some if sequence.row >= 0] for some in chunks]

    def _last_is_shared(self, sequence: Sequence) -> bool:
        size = self.cache.shape.block_size
        return sequence.computed % size != 0 and self.pool.holders[sequence.blocks[-1]] > 1

    def prefilled(self, sequence: Sequence, count: int) -> None:
        """Count the tokens of a sequence that were computed."""
        again = max(0, min(sequence.known, sequence.computed + count) - sequence.computed)
        self.stats.reprefilled += again
        self.stats.prefilled += count - again
        sequence.computed += count
        if sequence.computed >= sequence.prompt_length > 1:
            held = self.cache.shape.blocks(sequence.prompt_length - 1)
            self.prompts.computed(self._key(sequence), sequence, sequence.blocks[:held])

    # Memory.

    def _spare(self, blocks: int) -> bool:
        """Return whether this many blocks are free, and one more for each running request to grow into."""
        running = self.running
        return self._free_resting(blocks + running) if running else self._pool_has(blocks)

    def _pool_has(self, blocks: int) -> bool:
        while not self._free_resting(blocks) and self.prompts.release_one():
            pass
        return self.pool.free >= min(blocks, self.pool.count)

    def _free_resting(self, blocks: int) -> bool:
        """Take blocks of resting requests until this many are free, longest parked first; False if they are too few."""
        while self.pool.free < blocks:
            resting = next((one for one in (*self.parked, *reversed(self.swapped)) if one.blocks), None)
            if resting is None:
                return False
            self._free(resting)
        return True

    def _can_return(self, sequence: Sequence) -> bool:
        if self.running >= self._config.max_requests:
            return False
        missing = 0 if sequence.blocks else self.cache.shape.blocks(sequence.computed)
        # The search for room may have taken the request's own blocks, and with a full host its KV.
        return self._spare(missing + 1) and (bool(sequence.blocks) or missing > 0)

    def _return(self, sequence: Sequence) -> None:
        self._stop_resting(sequence)
        if sequence.host is not None:
            sequence.blocks = [self.pool.take() for _ in range(len(sequence.host))]
            self.cache.scatter(sequence.host, sequence.blocks)
            sequence.host = sequence.keep_alive = None
        self._batches[sequence.slot].add(sequence)

    def _rest(self, sequence: Sequence) -> None:
        """Keep the blocks that contain KV of a sequence that no longer runs, and release the others."""
        kept = self.cache.shape.blocks(sequence.computed)
        self.pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        self._resting[sequence.blocks] += 1

    def _stop_resting(self, sequence: Sequence) -> None:
        """Others may no longer take the blocks of this sequence."""
        self._resting[sequence.blocks] -= 1

    def _free(self, resting: Sequence) -> None:
        """Move the KV of a resting sequence to the host; if that is full, drop it, to be computed again."""
        self._stop_resting(resting)
        if not self._to_host(resting):
            self._release(resting)
            resting.forget_kv()
            if resting in self.swapped:
                self.swapped.remove(resting)
                self.enqueue(resting)

    def _room(self, blocks: int, wanting: Sequence) -> bool:
        """Free this many blocks by pre-empting newer requests; return False if `wanting` itself was pre-empted."""
        while not self._free_resting(blocks):
            others = (one for batch in self._batches for one in batch.sequences if one is not wanting)
            newest = max(others, key=lambda one: one.arrival, default=None)
            if newest is not None and newest.arrival > wanting.arrival:
                self._preempt(newest)
            elif self.prompts.release_one():
                continue
            elif newest is not None:
                self._preempt(wanting)
                return False
            else:
                raise AssertionError("a request was accepted that does not fit alone")
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch and move its KV to the host; drop it only if the host is full."""
        self.preempted = True
        self.stats.preempted += 1
        self.flush(sequence)
        if self._to_host(sequence):
            insort(self.swapped, sequence, key=lambda other: other.arrival)
        else:
            self.requeue(sequence)

    def _to_host(self, sequence: Sequence) -> bool:
        """Move the KV of a sequence to the host; return False if it has none or the host is full."""
        blocks = self.cache.shape.blocks(sequence.computed)
        size = blocks * self.cache.shape.block_bytes
        if not blocks or self.host_used + size > self._config.host_bytes:
            self.stats.recomputed += bool(blocks)
            return False
        host = self.cache.host(blocks)
        self.cache.gather(sequence.blocks[:blocks], sequence.computed, host)
        if sequence.row >= 0:
            self._batches[sequence.slot].remove(sequence)
        self._release(sequence)
        sequence.host = host
        self.host_used += size
        return True

    def _release(self, sequence: Sequence) -> None:
        self.prompts.lost(self._key(sequence), sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.host is not None:
            self.host_used -= sequence.host.nbytes
            sequence.host = sequence.keep_alive = None

    def _key(self, sequence: Sequence) -> PrefixKey:
        request = sequence.request
        return PrefixKey(sequence.slot, self.loads[sequence.slot], request.record_experts, request.prompt)

    def check(self) -> None:
        """Assert that every block, host byte and row is accounted for."""
        self.pool.check()
        holders = np.zeros_like(self.pool.holders)
        for batch in self._batches:
            for row, sequence in enumerate(batch.sequences):
                assert sequence.row == row
                ahead = sequence.length + int(batch.fill[row]) + self._config.stretch
                known = self.cache.shape.blocks(min(ahead, sequence.limit))
                assert len(sequence.blocks) <= known, f"a request holds {len(sequence.blocks)} blocks for {known}"
                np.add.at(holders, sequence.blocks, 1)
        for blocks in self.prompts.held():
            np.add.at(holders, blocks, 1)
        away = (*self.swapped, *self.parked)
        resting = np.zeros_like(holders)
        for sequence in away:
            assert not (sequence.blocks and sequence.host is not None), "a request has its KV twice"
            np.add.at(resting, sequence.blocks, 1)
        assert (resting == self._resting).all(), "the count of resting holders of a block is wrong"
        assert (holders + resting == self.pool.holders).all(), "a block has a holder that is no known request"
        kept = sum(sequence.host.nbytes for sequence in away if sequence.host is not None)
        assert kept == self.host_used, f"{self.host_used} bytes of host memory are counted, but {kept} are used"
