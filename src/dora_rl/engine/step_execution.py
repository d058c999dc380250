"""What the slots of an engine compute in a step.

Invariants:
- a pass of a slot is a forward pass and a draw: decoding rows first, then chunks of prompts. Where all rows of a slot
  are plain, many decode steps are done in one call of the kernels, for at most about `_PATIENCE`: so long may somebody
  who comes meanwhile have to wait;
- rows of a small model take turns: some do many steps, whose KV is near then, and those that waited longest are next.
  Rows of a large one share its weights, so all of them do the same few steps, and chunks go along with the first;
- slots that do nothing else decode side by side, each with its share of the threads and for about the same time: what
  threads lose by waiting for each other grows with their number. Otherwise one comes after the other, with all of them;
- slots share time, not steps: one with few requests, as old versions have, takes many steps while one with many takes
  a few, so that those for which the trainer may wait are through soon.
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

_PATIENCE: Nanoseconds = 5_000_000
"""How long a request may have to wait for the decode steps of others before it joins."""


class Work(NamedTuple):
    """What a pass did, in tokens."""

    decoded: int = 0
    prefilled: int = 0
    reprefilled: int = 0


class Pass(NamedTuple):
    """What a pass did and which rows need a look, with those of them that have ended."""

    work: Work
    rows: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]


class StepExecutor:
    """Passes of slots, by so many threads as there are at the time."""

    def __init__(self, scheduler: Scheduler, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._beside: ThreadPoolExecutor | None = None

    def passes(
        self, slots: list[EngineSlot], chunks: list[list[Chunk]], threads: int
    ) -> Iterator[tuple[EngineSlot, Pass]]:
        """Compute slots that have something to do."""
        if not any(chunks) and 1 < len(slots) <= threads and all(_plain(slot) for slot in slots):
            yield from self._side_by_side(slots, threads // len(slots))
            return
        for slot in slots:
            yield slot, self._pass(slot, chunks[slot.index], _PATIENCE // len(slots), threads)

    def _pass(self, slot: EngineSlot, chunks: list[Chunk], patience: Nanoseconds, threads: int) -> Pass:
        batch, runner = slot.batch, slot.runner
        assert runner is not None
        plain = _plain(slot)
        if not plain or (chunks and not runner.small):
            return self._compute(slot, chunks, threads)
        if not chunks:
            rows, steps = self._turn(slot, batch.decode_rows(), patience)
            return self._noted(slot, rows, decode(slot, rows, steps, threads))
        before = batch.decoding
        first = self._compute(slot, chunks, threads, decoding=False)
        fresh = batch.decode_rows()[before:]
        rows = batch.decode_rows()[:before]
        if self._scheduler.catch_up(batch):
            rows = np.setdiff1d(batch.decode_rows(), first.rows[first.ended])
        if not len(rows):
            return first
        rows, steps = self._turn(slot, rows, patience)
        sampled = decode(slot, rows, steps, threads)
        work = first.work._replace(decoded=first.work.decoded + sampled)
        return self._noted(slot, np.union1d(fresh, rows), sampled)._replace(work=work)

    def _compute(self, slot: EngineSlot, chunks: list[Chunk], threads: int, *, decoding: bool = True) -> Pass:
        return compute(slot, chunks, self._scheduler, threads, self._config.kernels != "torch", decoding=decoding)

    def _side_by_side(self, slots: list[EngineSlot], threads: int) -> Iterator[tuple[EngineSlot, Pass]]:
        if self._beside is None:
            self._beside = ThreadPoolExecutor(self._config.slots - 1, thread_name_prefix="slot")
        turns = [(slot, *self._turn(slot, slot.batch.decode_rows(), _PATIENCE), threads) for slot in slots]
        rest = [self._beside.submit(decode, *turn) for turn in turns[1:]]
        sampled = [decode(*turns[0]), *(one.result() for one in rest)]
        for (slot, rows, *_), count in zip(turns, sampled, strict=True):
            yield slot, self._noted(slot, rows, count)

    def _turn(self, slot: EngineSlot, rows: Rows, patience: Nanoseconds) -> tuple[Rows, int]:
        """Whose turn it is to decode, and how many steps: as many as nobody who comes meanwhile would mind."""
        assert slot.runner is not None
        tokens, steps = patience // max(slot.pace, 1), self._config.stretch
        if slot.runner.small:
            rows = slot.batch.longest_waiting(rows, max(1, tokens // steps))
        else:
            steps = max(1, min(steps, tokens // len(rows)))
        while steps > 1 and not self._scheduler.look_ahead(slot.batch, rows, steps):
            steps //= 2
        return rows, steps

    def _noted(self, slot: EngineSlot, rows: Rows, sampled: int) -> Pass:
        self._scheduler.stats.decoded += sampled
        return Pass(Work(sampled), *slot.batch.notable(rows))


def _plain(slot: EngineSlot) -> bool:
    """The kernels can decode all of its rows without anybody looking."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    return runner.stretches and bool(batch.plain[: len(batch)].all())


def decode(slot: EngineSlot, rows: Rows, steps: int, threads: int) -> int:
    """Decode, and note how long a token takes."""
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
) -> Pass:
    """Compute decoding rows, unless told not to, and chunks of a slot; sample for all that have their logits."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    first = 0 if decoding else batch.decoding
    decoded = batch.decoding - first
    complete = _lay_rows(batch, decoded, chunks)
    record = any(sequence.request.record_experts for sequence in batch.sequences)
    logits = runner.forward(batch.rows, threads, record)
    again = scheduler.stats.reprefilled
    if record:
        _keep_experts(runner.experts(), decoded, chunks)
    for sequence, count in chunks:
        scheduler.prefilled(sequence, count)
    again = scheduler.stats.reprefilled - again
    for sequence in complete:
        # Its KV is whole now; what is left is to sample, like any decoding row.
        sequence.computed = sequence.length - 1
        batch.promote(sequence)
    rows = batch.decode_rows()[first:]
    if len(rows):
        # Those promoted just now stand behind the others, in the order of their logits.
        end = batch.decoding
        drawn = draw(logits, batch.settings.part(first, end), batch.place[first:end], threads, use_kernels)
        experts = runner.experts() if record else None
        if experts is not None:
            experts = experts[batch.rows.logit_row[: len(rows)]] if experts.size else None
        batch.absorb(rows, drawn, experts)
    scheduler.stats.decoded += len(rows)
    look, ended = batch.notable(rows)
    prefilled = sum(count for _, count in chunks)
    return Pass(Work(decoded, prefilled - again, again), look, ended)


def _keep_experts(experts: npt.NDArray[np.int16], start: int, chunks: list[Chunk]) -> None:
    """Those of the prompts' rows, which stand behind the decoding ones."""
    for sequence, count in chunks:
        if sequence.request.record_experts and experts.size:
            sequence.keep_experts(experts[start : start + count])
        start += count


def _lay_rows(batch: DecodeBatch, decoded: int, chunks: list[Chunk]) -> list[Sequence]:
    """Fill the static buffers; gives the sequences whose last token is among the rows."""
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
