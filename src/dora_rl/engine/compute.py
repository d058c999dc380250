"""One forward pass and one draw for one slot: decoding rows first, then chunks of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dora_rl.engine.sampling import draw

if TYPE_CHECKING:
    from dora_rl.engine.batch import Batch
    from dora_rl.engine.scheduler import Scheduler
    from dora_rl.engine.sequence import Sequence
    from dora_rl.engine.slots import Slot


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


def compute(
    slot: Slot,
    chunks: list[tuple[Sequence, int]],
    scheduler: Scheduler,
    threads: int,
    use_kernels: bool,
    steps: int = 1,
) -> Pass:
    """Compute the decoding rows and the chunks of a slot, and sample for all that have their logits.

    Several steps are only for slots with nothing but plain decoding rows.
    """
    batch, runner = slot.batch, slot.runner
    assert runner is not None
    if steps > 1:
        sampled = runner.decode(batch, steps, threads)
        scheduler.stats.decoded += sampled
        return Pass(Work(sampled), *batch.notable(batch.decode_rows()))
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


def _keep_experts(experts: npt.NDArray[np.int16], start: int, chunks: list[tuple[Sequence, int]]) -> None:
    """Those of the prompts' rows, which stand behind the decoding ones."""
    for sequence, count in chunks:
        if sequence.request.record_experts and experts.size:
            sequence.keep_experts(experts[start : start + count])
        start += count


def _lay_rows(batch: Batch, chunks: list[tuple[Sequence, int]]) -> list[Sequence]:
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
