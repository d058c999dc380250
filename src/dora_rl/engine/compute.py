"""What the slots of an engine compute in a step.

Invariants:
- a pass of a slot is a forward pass and a draw: decoding rows first, then chunks of prompts. Where a slot has nothing
  but plain decoding rows, or nothing else once its chunks are through, several steps are done in one call of the
  kernels: nobody waits for them longer than `_PATIENCE`;
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

    from dora_rl.core.nouns import Nanoseconds
    from dora_rl.engine.batch import Batch
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.scheduler import Scheduler
    from dora_rl.engine.sequence import Sequence
    from dora_rl.engine.slots import Slot

    Chunk: TypeAlias = tuple[Sequence, int]

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


class Computing:
    """Passes of slots, by so many threads as there are at the time."""

    def __init__(self, scheduler: Scheduler, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._beside: ThreadPoolExecutor | None = None

    def passes(self, slots: list[Slot], chunks: list[list[Chunk]], threads: int) -> Iterator[tuple[Slot, Pass]]:
        """Compute slots that have something to do."""
        if not any(chunks) and 1 < len(slots) <= threads and all(_plain(slot) for slot in slots):
            yield from self._side_by_side(slots, threads // len(slots))
            return
        for slot in slots:
            patience = _PATIENCE // len(slots)
            if chunks[slot.index]:
                done = compute(slot, chunks[slot.index], self._scheduler, threads, self._config.kernels != "torch")
                yield slot, self._gone_on(slot, done, patience, threads)
                continue
            steps = self._steps(slot, patience) if _plain(slot) else 1
            begin = time.perf_counter_ns()
            if steps > 1:
                done = self._decoded(slot, _decode(slot, steps, threads))
            else:
                done = compute(slot, [], self._scheduler, threads, self._config.kernels != "torch")
            slot.pace = (time.perf_counter_ns() - begin) // steps
            yield slot, done

    def _side_by_side(self, slots: list[Slot], threads: int) -> Iterator[tuple[Slot, Pass]]:
        if self._beside is None:
            self._beside = ThreadPoolExecutor(self._config.slots - 1, thread_name_prefix="slot")
        steps = [self._steps(slot, _PATIENCE) for slot in slots]
        rest = [self._beside.submit(_timed, *one, threads) for one in zip(slots[1:], steps[1:], strict=True)]
        sampled = [_timed(slots[0], steps[0], threads), *(one.result() for one in rest)]
        for slot, count in zip(slots, sampled, strict=True):
            yield slot, self._decoded(slot, count)

    def _gone_on(self, slot: Slot, done: Pass, patience: Nanoseconds, threads: int) -> Pass:
        """After a pass with chunks: some more steps, if nobody waits for a next chunk. Who has ended takes no part."""
        batch = slot.batch
        steps = min(self._config.stretch - 1, patience // max(slot.pace, 1))
        if steps < 1 or not 0 < batch.decoding == len(batch) or not _plain(slot):
            return done
        if not self._scheduler.look_ahead(batch, steps, sampled=True):
            return done
        begin = time.perf_counter_ns()
        sampled = _decode(slot, steps, threads, sampled=True)
        slot.pace = (time.perf_counter_ns() - begin) // steps
        more = self._decoded(slot, sampled)
        return more._replace(work=done.work._replace(decoded=done.work.decoded + sampled))

    def _steps(self, slot: Slot, patience: Nanoseconds) -> int:
        """How many decode steps to do in one go: as many as nobody who comes meanwhile would mind waiting for."""
        wanted = min(self._config.stretch, patience // max(slot.pace, 1))
        return wanted if wanted > 1 and self._scheduler.look_ahead(slot.batch, wanted) else 1

    def _decoded(self, slot: Slot, sampled: int) -> Pass:
        self._scheduler.stats.decoded += sampled
        return Pass(Work(sampled), *slot.batch.notable(slot.batch.decode_rows()))


def _plain(slot: Slot) -> bool:
    """The kernels can decode all of its rows without anybody looking."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    return runner.stretches and bool(batch.plain[: batch.decoding].all())


def _decode(slot: Slot, steps: int, threads: int, *, sampled: bool = False) -> int:
    assert slot.runner is not None
    return slot.runner.decode(slot.batch, steps, threads, sampled=sampled)


def _timed(slot: Slot, steps: int, threads: int) -> int:
    """Decode, and note how long a step takes beside others."""
    begin = time.perf_counter_ns()
    sampled = _decode(slot, steps, threads)
    slot.pace = (time.perf_counter_ns() - begin) // steps
    return sampled


def compute(slot: Slot, chunks: list[Chunk], scheduler: Scheduler, threads: int, use_kernels: bool) -> Pass:
    """Compute the decoding rows and the chunks of a slot, and sample for all that have their logits."""
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    complete = _lay_rows(batch, chunks)
    decoded = batch.decoding
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
    rows = batch.decode_rows()
    if len(rows):
        # Those promoted just now stand behind the others, in the order of their logits.
        drawn = draw(logits, batch.settings.first(len(rows)), batch.place[: len(rows)], threads, use_kernels)
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


def _lay_rows(batch: Batch, chunks: list[Chunk]) -> list[Sequence]:
    """Fill the static buffers; gives the sequences whose last token is among the rows."""
    rows, count = batch.rows, batch.decoding
    rows.token[:count] = batch.token[:count]
    rows.position[:count] = batch.position[:count]
    rows.sequence[:count] = batch.decode_rows()
    rows.logit_row[:count] = batch.decode_rows()
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
