"""Who runs in the next step, and in which blocks.

    waiting --admit--> running --finish, abort, export--> gone
                      |   ^   |
                pre-empt  |  park            (KV in host memory; dropped only when that is full)
                      v return v
                    swapped <- parked

Invariants:
- at most `max_requests` run, over all slots; the blocks in use never exceed the pool, the swapped KV never its cap;
- a parked request rests: it keeps its blocks until others need them, and only then its KV goes to the host;
- the oldest running request can always go on: it may take the blocks of every newer one, and no request is let in that
  does not fit alone;
- swapped requests return before waiting ones are admitted;
- order is that of arrival, so a run repeats.
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
        """They wait for their environments."""
        self.stats = Stats()
        self.host_used = 0
        self.pressed = False
        """A request was pre-empted since this was last cleared."""
        self.loads = [0] * len(batches)
        """How often each slot has been loaded."""
        self._resting = np.zeros_like(self.pool.holders)
        """How many hold each block that do not run."""
        self._batches = batches
        self._config = config
        self._report = report

    # Requests come and go.

    def enqueue(self, sequence: Sequence) -> None:
        """Wait for room."""
        insort(self.waiting, sequence, key=lambda other: other.arrival)
        self.prompts.join(self._key(sequence))

    def drop(self, sequence: Sequence) -> None:
        """Forget a request wherever it is; its tokens must have been flushed if it runs."""
        if sequence.row >= 0:
            self._batches[sequence.slot].remove(sequence)
        elif sequence in self.swapped:
            self.swapped.remove(sequence)
            self._stir(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
            self._stir(sequence)
        else:
            self.waiting.remove(sequence)
            self.prompts.leave(self._key(sequence))
        self._release(sequence)

    def flush(self, sequence: Sequence) -> None:
        """Report what a running sequence has sampled so far."""
        if sequence.row >= 0:
            chunk = self._batches[sequence.slot].flush(sequence)
            if chunk is not None:
                self._report(chunk)

    def requeue(self, sequence: Sequence) -> None:
        """Back to the waiting ones, without KV."""
        self.flush(sequence)
        self.drop(sequence)
        sequence.forget_kv()
        self.enqueue(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """A sequence that comes with its KV in `host`: run it now, keep it on the host, or compute it again."""
        assert sequence.host is not None
        if self._returns(sequence):
            self._come_back(sequence)
        elif self.host_used + sequence.host.nbytes <= self._config.host_bytes:
            self.host_used += sequence.host.nbytes
            insort(self.swapped, sequence, key=lambda other: other.arrival)
        else:
            self.stats.recomputed += 1
            sequence.forget_kv()
            self.enqueue(sequence)

    def park(self, sequence: Sequence) -> None:
        """Out of the batch until it is woken."""
        if sequence.row >= 0:
            self.flush(sequence)
            self._batches[sequence.slot].remove(sequence)
            self._rest(sequence)
        elif sequence.host is not None:  # it has come from elsewhere
            if self.host_used + sequence.host.nbytes > self._config.host_bytes:
                self.stats.recomputed += 1
                sequence.forget_kv()
            else:
                self.host_used += sequence.host.nbytes
        self.parked.append(sequence)

    def wake(self, sequence: Sequence) -> None:
        """Go on with a parked one."""
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
        """Tokens' worth of blocks in use; what rests makes way for whoever comes."""
        return int(np.count_nonzero(self.pool.holders > self._resting)) * self.cache.shape.block_size

    # One step's plan.

    def plan(self) -> list[list[tuple[Sequence, int]]]:
        """Blocks for every decoding row, then returns, admissions and prefill: for each slot, chunks to prefill."""
        self._extend_all()
        before = self.running
        while self.swapped and self._returns(self.swapped[0]):
            sequence = self.swapped.pop(0)
            if sequence.host is not None:
                self.host_used -= sequence.host.nbytes
            self._come_back(sequence)
        if not self.swapped:
            self._admit()
        if self.running != before:
            self._extend_all()
        return self._chunks()

    def _extend_all(self) -> None:
        for batch in self._batches:
            self._extend(batch)

    def _extend(self, batch: DecodeBatch) -> None:
        """Every decoding row gets a block of its own to write into."""
        size = self.cache.shape.block_size
        rows = batch.decode_rows()
        position = batch.position[rows]
        held = self.pool.holders[batch.rows.table[rows, position // size]]
        needy = rows[(position % size == 0) | (held > 1)]
        for sequence in [batch.sequences[row] for row in needy]:
            if sequence.row < 0:
                continue
            # A plan may come here twice, and blocks may have been taken ahead: what is needed may be there already.
            index = int(batch.position[sequence.row]) // size
            missing = index == len(sequence.blocks)
            if not missing and self.pool.holders[sequence.blocks[index]] == 1:
                continue
            if not self._room(1, sequence):
                continue
            if missing:
                sequence.blocks.append(self.pool.take())
            elif self.pool.holders[sequence.blocks[index]] > 1:
                self._own(sequence, index)
            batch.set_blocks(sequence)

    def look_ahead(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int) -> bool:
        """Blocks for so many tokens of these decoding rows; False if they are not to spare without anybody leaving."""
        end = np.minimum(batch.position[rows] + steps - 1, batch.last[rows] - 1)
        needed = end // self.cache.shape.block_size + 1 - batch.held[rows]
        needy = needed > 0
        if not self._has(int(needed[needy].sum()) + self.running):
            return False
        for row, count in zip(rows[needy].tolist(), needed[needy].tolist(), strict=True):
            sequence = batch.sequences[row]
            sequence.blocks.extend(self.pool.take() for _ in range(count))
            batch.set_blocks(sequence)
        return True

    def catch_up(self, batch: DecodeBatch) -> bool:
        """Blocks to write into also for rows that came to decode after the plan; False if nobody has them to spare."""
        if not self._has(self.running):
            return False
        self._extend(batch)
        return True

    def _own(self, sequence: Sequence, index: int) -> None:
        """Copy on write: a block becomes its own."""
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
            # Making room may have cost the shared prompt itself.
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
        """Which prompt tokens this step computes, oldest request first."""
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
                self._own(sequence, len(sequence.blocks) - 1)
            sequence.blocks.extend(self.pool.take() for _ in range(needed))
            self._batches[sequence.slot].set_blocks(sequence)
            chunks[sequence.slot].append((sequence, count))
            budget -= count
        # Making room for one may have pre-empted another that already had its chunk.
        return [[(sequence, count) for sequence, count in some if sequence.row >= 0] for some in chunks]

    def _last_is_shared(self, sequence: Sequence) -> bool:
        size = self.cache.shape.block_size
        return sequence.computed % size != 0 and self.pool.holders[sequence.blocks[-1]] > 1

    def prefilled(self, sequence: Sequence, count: int) -> None:
        """Tokens of a sequence were computed."""
        again = max(0, min(sequence.known, sequence.computed + count) - sequence.computed)
        self.stats.reprefilled += again
        self.stats.prefilled += count - again
        sequence.computed += count
        if sequence.computed >= sequence.prompt_length > 1:
            held = self.cache.shape.blocks(sequence.prompt_length - 1)
            self.prompts.computed(self._key(sequence), sequence, sequence.blocks[:held])

    # Memory.

    def _spare(self, blocks: int) -> bool:
        """So many blocks are free, and one more for each running request to grow into."""
        running = self.running
        return self._has(blocks + running) if running else self._pool_has(blocks)

    def _pool_has(self, blocks: int) -> bool:
        while not self._has(blocks) and self.prompts.let_go():
            pass
        return self.pool.free >= min(blocks, self.pool.count)

    def _has(self, blocks: int) -> bool:
        """So many blocks are free, after what rests has made way if need be: the longest parked first."""
        while self.pool.free < blocks:
            resting = next((one for one in (*self.parked, *reversed(self.swapped)) if one.blocks), None)
            if resting is None:
                return False
            self._make_way(resting)
        return True

    def _returns(self, sequence: Sequence) -> bool:
        if self.running >= self._config.max_requests:
            return False
        missing = 0 if sequence.blocks else self.cache.shape.blocks(sequence.computed)
        # Looking for room may have cost the request its own blocks, and with a full host its KV.
        return self._spare(missing + 1) and (bool(sequence.blocks) or missing > 0)

    def _come_back(self, sequence: Sequence) -> None:
        self._stir(sequence)
        if sequence.host is not None:
            sequence.blocks = [self.pool.take() for _ in range(len(sequence.host))]
            self.cache.scatter(sequence.host, sequence.blocks)
            sequence.host = sequence.keep_alive = None
        self._batches[sequence.slot].add(sequence)

    def _rest(self, sequence: Sequence) -> None:
        """It does not run, and keeps the blocks that have something of it."""
        kept = self.cache.shape.blocks(sequence.computed)
        self.pool.release(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        self._resting[sequence.blocks] += 1

    def _stir(self, sequence: Sequence) -> None:
        """Whatever blocks it rests on are no longer for others to take."""
        self._resting[sequence.blocks] -= 1

    def _make_way(self, resting: Sequence) -> None:
        """Its KV goes to the host; if that is full, it is computed again when the request goes on."""
        self._stir(resting)
        if not self._to_host(resting):
            self._release(resting)
            resting.forget_kv()
            if resting in self.swapped:
                self.swapped.remove(resting)
                self.enqueue(resting)

    def _room(self, blocks: int, wanting: Sequence) -> bool:
        """Make so many blocks free by pre-empting newer requests; False if the wanting one itself had to go."""
        while not self._has(blocks):
            others = (one for batch in self._batches for one in batch.sequences if one is not wanting)
            newest = max(others, key=lambda one: one.arrival, default=None)
            if newest is not None and newest.arrival > wanting.arrival:
                self._preempt(newest)
            elif self.prompts.let_go():
                continue
            elif newest is not None:
                self._preempt(wanting)
                return False
            else:
                raise AssertionError("a request was let in that does not fit alone")
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Out of the batch, KV to the host; dropped only if the host is full."""
        self.pressed = True
        self.stats.preempted += 1
        self.flush(sequence)
        if self._to_host(sequence):
            insort(self.swapped, sequence, key=lambda other: other.arrival)
        else:
            self.requeue(sequence)

    def _to_host(self, sequence: Sequence) -> bool:
        """A sequence's KV to the host, out of the batch if it runs; False if there is none or the host is full."""
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
        """Every block, host byte and row is accounted for."""
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
        assert (resting == self._resting).all(), "a block rests, or does not, and nobody knows"
        assert (holders + resting == self.pool.holders).all(), "a block has a holder that nobody knows"
        kept = sum(sequence.host.nbytes for sequence in away if sequence.host is not None)
        assert kept == self.host_used, f"{self.host_used} bytes of host memory counted, {kept} used"
