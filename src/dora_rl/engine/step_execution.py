"""Computes the slots of an engine in one step.

Invariants:
- a pass of a slot is a forward pass and a draw: decoding rows first, then chunks of prompts. If all rows of a slot are
  plain, one call of the kernels computes many decode steps, for at most about `_CALL_TIME`: a request that arrives
  meanwhile waits no longer than that;
- rows of a small model take turns: some compute many steps, so that their KV stays in the cache, and those that waited
  longest are next. Rows of a large model share the pass over its weights, so all of them compute the same few steps,
  and prefill chunks join the first;
- slots that only decode run in parallel, each with its share of the threads and for about the same time: what threads
  lose by waiting for each other grows with their number. Otherwise the slots run one after the other, with all threads;
- slots share time, not steps: a slot with few requests, as old versions have, computes many steps while one with many
  computes a few, so that requests for which the trainer may wait are finished soon.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dora_rl.engine.sampling import draw

if TYPE_CHECKING:
    from typing import TypeAlias

    from dora_rl.core.types import Nanoseconds
    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.scheduler import Scheduler
    from dora_rl.engine.sequence import Sequence
    from dora_rl.engine.slots import EngineSlot

    Chunk: TypeAlias = tuple[Sequence, int]
    Rows: TypeAlias = npt.NDArray[np.int64]

_CALL_TIME: Nanoseconds = 5_000_000
"""How long a request may have to wait for the decode steps of others before it joins the batch."""


class TokenCounts(NamedTuple):
    """Tokens that a pass computed."""

    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0


class PassResult(NamedTuple):
    """Tokens that a pass computed, the rows to inspect, and which of these have ended."""

    work: TokenCounts
    rows: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]


class StepExecutor:
    """Runs the passes of slots with the threads that the engine has."""

    def __init__(self, scheduler: Scheduler, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._pool: ThreadPoolExecutor | None = None

    def passes(
        self, slots: list[EngineSlot], chunks: list[list[Chunk]], threads: int
    ) -> Iterator[tuple[EngineSlot, PassResult]]:
        """Compute these slots, which have work."""
        if not any(chunks) and 1 < len(slots) <= threads and all(_plain(slot) for slot in slots):
            yield from self._in_parallel(slots, threads // len(slots))
            return
        for slot in slots:
            yield slot, self._pass(slot, chunks[slot.index], _CALL_TIME // len(slots), threads)

    def _pass(self, slot: EngineSlot, chunks: list[Chunk], call_time: Nanoseconds, threads: int) -> PassResult:
        batch, runner = slot.batch, slot.runner
        assert runner is not None
        plain = _plain(slot)
        if not plain or (chunks and not runner.small):
            return self._compute(slot, chunks, threads)
        if not chunks:
            rows, steps = self._turn(slot, batch.decode_rows(), call_time)
            return self._result(slot, rows, decode(slot, rows, steps, threads))
        before = batch.decoding
        first = self._compute(slot, chunks, threads, decoding=False)
        fresh = batch.decode_rows()[before:]
        rows = batch.decode_rows()[:before]
        if self._scheduler.catch_up(batch):
            rows = np.setdiff1d(batch.decode_rows(), first.rows[first.ended])
        if not len(rows):
            return first
        rows, steps = self._turn(slot, rows, call_time)
        sampled = decode(slot, rows, steps, threads)
        work = first.work._replace(decoded=first.work.decoded + sampled)
        return self._result(slot, np.union1d(fresh, rows), sampled)._replace(work=work)

    def _compute(self, slot: EngineSlot, chunks: list[Chunk], threads: int, *, decoding: bool = True) -> PassResult:
        return compute(slot, chunks, self._scheduler, threads, self._config.kernels != "torch", decoding=decoding)

    def _in_parallel(self, slots: list[EngineSlot], threads: int) -> Iterator[tuple[EngineSlot, PassResult]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._config.slots - 1, thread_name_prefix="slot")
        turns = [(slot, *self._turn(slot, slot.batch.decode_rows(), _CALL_TIME), threads) for slot in slots]
        rest = [self._pool.submit(decode, *turn) for turn in turns[1:]]
        sampled = [decode(*turns[0]), *(one.result() for one in rest)]
        for (slot, rows, *_), count in zip(turns, sampled, strict=True):
            yield slot, self._result(slot, rows, count)

    def _turn(self, slot: EngineSlot, rows: Rows, call_time: Nanoseconds) -> tuple[Rows, int]:
        """Choose the rows that decode and the number of steps, so that the call takes about `call_time`."""
        assert slot.runner is not None
        tokens, steps = call_time // max(slot.pace, 1), self._config.stretch
        if slot.runner.small:
            rows = slot.batch.longest_waiting(rows, max(1, tokens // steps))
        else:
            steps = max(1, min(steps, tokens // len(rows)))
        while steps > 1 and not self._scheduler.look_ahead(slot.batch, rows, steps):
            steps //= 2
        return rows, steps

    def _result(self, slot: EngineSlot, rows: Rows, sampled: int) -> PassResult:
        self._scheduler.stats.decoded += sampled
        return PassResult(TokenCounts(sampled), *slot.batch.rows_to_inspect(rows))


def _plain(slot: EngineSlot) -> bool:
    """Return whether the kernels can decode all rows of the slot without an inspection after each token."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    return runner.stretches and bool(batch.plain[: len(batch)].all())


def decode(slot: EngineSlot, rows: Rows, steps: int, threads: int) -> int:
    """Decode these rows, and measure the time per token."""
    assert slot.runner is not None
    begin = time.perf_counter_ns()
    sampled = slot.runner.decode(slot.batch, rows, steps, threads)
    slot.pace = (time.perf_counter_ns() - begin) // max(1, sampled)
    return sampled


def compute(
    slot: EngineSlot,
    chunks: list[Chunk],
    scheduler: Scheduler,
    threads: int,
    use_kernels: bool,
    *,
    decoding: bool = True,
) -> PassResult:
    """Compute the chunks of a slot, and its decoding rows if `decoding`; sample for all rows that have logits."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    first = 0 if decoding else batch.decoding
    decoded = batch.decoding - first
    complete = _fill_rows(batch, decoded, chunks)
    record = any(sequence.request.record_experts for sequence in batch.sequences)
    logits = runner.forward(batch.rows, threads, record)
    again = scheduler.stats.reprefilled
    if record:
        _keep_experts(runner.experts(), decoded, chunks)
    for sequence, count in chunks:
        scheduler.prefilled(sequence, count)
    again = scheduler.stats.reprefilled - again
    for sequence in complete:
        # All of its KV is computed now; what is left is to sample, as for any decoding row.
        sequence.computed = sequence.length - 1
        batch.promote(sequence)
    rows = batch.decode_rows()[first:]
    if len(rows):
        # The rows that were just promoted follow the others, in the order of their logits.
        end = batch.decoding
        drawn = draw(logits, batch.settings.part(first, end), batch.response_index[first:end], threads, use_kernels)
        experts = runner.experts() if record else None
        if experts is not None:
            experts = experts[batch.rows.logit_row[: len(rows)]] if experts.size else None
        batch.append(rows, drawn, experts)
    scheduler.stats.decoded += len(rows)
    inspected, ended = batch.rows_to_inspect(rows)
    prefilled = sum(count for _, count in chunks)
    return PassResult(TokenCounts(decoded, prefilled - again, again), inspected, ended)


def _keep_experts(experts: npt.NDArray[np.int16], start: int, chunks: list[Chunk]) -> None:
    """Keep the experts of the prompts' rows, which follow the decoding rows."""
    for sequence, count in chunks:
        if sequence.request.record_experts and experts.size:
            sequence.keep_experts(experts[start : start + count])
        start += count


def _fill_rows(batch: DecodeBatch, decoded: int, chunks: list[Chunk]) -> list[Sequence]:
    """Fill the static buffers; return the sequences whose last token is among the rows."""
    rows, count = batch.rows, decoded
    rows.token[:count] = batch.token[:count]
    rows.position[:count] = batch.position[:count]
    rows.sequence[:count] = batch.decode_rows()[:count]
    rows.logit_row[:count] = batch.decode_rows()[:count]
    logits = count
    complete = []
    for sequence, size in chunks:
        start, end = sequence.computed, sequence.computed + size
        rows.token[count : count + size] = sequence.tokens[start:end]
        rows.position[count : count + size] = np.arange(start, end)
        rows.sequence[count : count + size] = sequence.row
        count += size
        if end == sequence.length:
            rows.logit_row[logits] = count - 1
            logits += 1
            complete.append(sequence)
    rows.count, rows.logit_count = count, logits
    return complete
