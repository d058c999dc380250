"""Computes the log-probs of given tokens with a runner, in the way in which it serves requests.

All sequences form one batch: their beginnings are prefilled together, then the last tokens of each are computed one by
one, as decode steps, over the paged KV of the earlier tokens. The KV is in a temporary cache, so running requests are
not affected, and a full cache is no obstacle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dora_rl.core.probe import DECODED, Probe, ProbeResult
from dora_rl.core.types import SlotId, Version
from dora_rl.engine.kv import KvCache, KvShape
from dora_rl.engine.token_rows import TokenRows

if TYPE_CHECKING:
    from dora_rl.engine.runner import Runner


class Prober:
    """Compares the log-probs that runners of an engine compute with those that the trainer published."""

    def __init__(self, model: Any, shape: KvShape, *, limit: int, context: int, tolerance: float | None) -> None:
        self._shape = shape
        self._device = model.device
        self._limit = limit
        self._context = context
        self._tolerance = tolerance

    def check(self, runner: Runner, probe: Probe, slot: SlotId, version: Version, threads: int) -> ProbeResult:
        """Return the difference; one above the tolerance is a `ProbeError`."""
        sequences = probe.within(self._context)
        found = logprobs(runner, self._shape, self._device, sequences, limit=self._limit, threads=threads)
        return probe.compare(
            [one.tolist() for one in found],
            dtype=self._shape.dtype,
            tolerance=self._tolerance,
            slot=slot,
            version=version,
        )


class _Row(NamedTuple):
    """One token to compute."""

    sequence: int
    position: int


def logprobs(
    runner: Runner,
    shape: KvShape,
    device: torch.device,
    sequences: Sequence[Sequence[int]],
    *,
    limit: int,
    threads: int = 1,
    decoded: int = DECODED,
) -> list[npt.NDArray[np.float32]]:
    """Return, for each sequence, the model's log-probs (temperature 1) of all its tokens but the first.

    `limit` is the most rows that the runner takes at once; the last `decoded` tokens of each sequence are computed one
    by one. The last token of a sequence is not computed, since no log-prob depends on it.
    """
    inputs = [len(sequence) - 1 for sequence in sequences]
    assert min(inputs) >= 1, "a sequence needs a token that predicts and one that is predicted"
    blocks = [shape.blocks(count) for count in inputs]
    cache = KvCache(shape, sum(blocks) * shape.block_bytes, device)
    rows = TokenRows(limit, len(sequences), max(blocks))
    first = 0
    for index, count in enumerate(blocks):
        rows.table[index, :count] = np.arange(first, first + count)
        first += count
    found = [np.zeros(count, dtype=np.float32) for count in inputs]
    with runner.computing_in(cache):
        for part in _passes(inputs, decoded, limit):
            targets = _fill_rows(rows, part, sequences)
            logits = runner.forward(rows, threads, False)
            values = logits.log_softmax(-1).gather(1, targets.to(logits.device)[:, None])[:, 0].cpu().numpy()
            for row, value in zip(part, values, strict=True):
                found[row.sequence][row.position] = value
    return found


def _passes(inputs: Sequence[int], decoded: int, limit: int) -> Iterator[list[_Row]]:
    """Return the rows of each pass: the beginnings (in chunks, if they are many), then one decode step at a time."""
    begin = [max(1, count - decoded) for count in inputs]
    yield from _chunks([_Row(i, position) for i, count in enumerate(begin) for position in range(count)], limit)
    for step in range(decoded):
        steps = [_Row(i, start + step) for i, start in enumerate(begin) if start + step < inputs[i]]
        yield from _chunks(steps, limit)


def _chunks(rows: list[_Row], limit: int) -> Iterator[list[_Row]]:
    for start in range(0, len(rows), limit):
        yield rows[start : start + limit]


def _fill_rows(rows: TokenRows, part: list[_Row], sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Fill the buffers of a pass in which every row has logits; return the tokens to predict."""
    count = len(part)
    rows.count = rows.logit_count = count
    rows.token[:count] = [sequences[row.sequence][row.position] for row in part]
    rows.position[:count] = [row.position for row in part]
    rows.sequence[:count] = [row.sequence for row in part]
    rows.logit_row[:count] = np.arange(count)
    return torch.tensor([sequences[row.sequence][row.position + 1] for row in part])
