"""The running requests of one slot, as columns of static buffers.

Invariants:
- rows [0, decoding) have one token left to compute; rows [decoding, count) still prefill;
- row i of every column belongs to `sequences[i]`, whose `row` is i;
- sampled tokens stay in `history` until they are flushed, so a steady decode step touches no Python object per request;
- a row that is due for flushing has room in its history for `stretch` more tokens, since one pass may add that many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dora_rl.core.tokens import TokenChunk
from dora_rl.engine.sampling import Drawn, Settings
from dora_rl.engine.token_rows import TokenRows

if TYPE_CHECKING:
    from dora_rl.engine.sequence import Sequence

STOP_IDS = 4  # columns to start with; more are added when a request has more stop ids


class DecodeBatch:
    """At most `limit` sequences of one slot."""

    def __init__(self, limit: int, chunk: int, max_blocks: int, every: int, stretch: int) -> None:
        self.sequences: list[Sequence] = []
        self.decoding = 0
        self.rows = TokenRows(limit + chunk, limit, max_blocks)
        self.settings = Settings(limit)
        self.response_index = np.zeros(limit, dtype=np.uint64)
        """Index in the response of the next token."""
        self.token = np.zeros(limit, dtype=np.int64)
        """The token that is left to compute."""
        self.position = np.zeros(limit, dtype=np.int32)
        """Position of that token in the sequence."""
        self.last = np.zeros(limit, dtype=np.int32)
        """Position of the last token that the length limit allows."""
        self.stops = np.full((limit, STOP_IDS), -1, dtype=np.int64)
        self.watched = np.zeros(limit, dtype=bool)
        """The row has stop strings, so Python inspects it after every token."""
        self.plain = np.zeros(limit, dtype=bool)
        """The row needs nothing but its tokens: no stop strings, no bias, no record of experts."""
        self.turn = np.zeros(limit, dtype=np.int64)
        """Number of the turn in which the row decoded last; 0: it has not decoded yet."""
        self._turns = 0
        self.every = every
        width = every + stretch
        self.held = np.zeros(limit, dtype=np.int32)
        """Number of KV blocks of the row."""
        self.fill = np.zeros(limit, dtype=np.int32)
        """Tokens in the history of the row."""
        self.history = np.zeros((limit, width), dtype=np.int64)
        self.logprobs = np.zeros((limit, width), dtype=np.float32)
        self.model_logprobs = np.zeros((limit, width), dtype=np.float32)
        self.experts: npt.NDArray[np.int16] | None = None
        self._columns = ("response_index", "token", "position", "last", "watched", "plain", "turn", "held", "fill")
        self._wide = ("stops", "history", "logprobs", "model_logprobs")
        self._all = np.arange(limit, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, with its blocks."""
        row = len(self.sequences)
        self.sequences.append(sequence)
        sequence.row = row
        sampling = sequence.request.sampling
        self.settings.put(row, sampling, sequence.request.trajectory)
        self.last[row] = sequence.limit - 1
        stops = sampling.stop_ids
        if len(stops) > self.stops.shape[1]:
            extra = np.full((len(self.stops), len(stops) - self.stops.shape[1]), -1, dtype=np.int64)
            self.stops = np.concatenate([self.stops, extra], axis=1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self.watched[row] = bool(sampling.stop)
        self.plain[row] = not (sampling.stop or sampling.logit_bias or sequence.request.record_experts)
        self.turn[row] = 0
        self.fill[row] = 0
        self.set_blocks(sequence)
        if sequence.decodes:
            self.promote(sequence)

    def set_blocks(self, sequence: Sequence) -> None:
        """Update the block table of a sequence."""
        self.held[sequence.row] = len(sequence.blocks)
        self.rows.table[sequence.row, : len(sequence.blocks)] = sequence.blocks

    def promote(self, sequence: Sequence) -> None:
        """Turn a prefilling sequence into a decoding one."""
        assert sequence.row >= self.decoding
        self._swap(sequence.row, self.decoding)
        row = sequence.row
        self.token[row] = sequence.tokens[sequence.length - 1]
        self.position[row] = sequence.length - 1
        self.response_index[row] = sequence.length - sequence.prompt_length
        self.decoding += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which must have been flushed."""
        row = sequence.row
        assert self.fill[row] == 0, "a request was removed before its tokens were flushed"
        if row < self.decoding:
            self._swap(row, self.decoding - 1)
            self.decoding -= 1
        self._swap(sequence.row, len(self.sequences) - 1)
        self.sequences.pop()
        sequence.row = -1

    def append(self, rows: npt.NDArray[np.int64], drawn: Drawn, experts: npt.NDArray[np.int16] | None) -> None:
        """Append one sampled token to each of these decoding rows."""
        at = self.fill[rows]
        self.history[rows, at] = drawn.token
        self.logprobs[rows, at] = drawn.logprob
        self.model_logprobs[rows, at] = drawn.model_logprob
        if experts is not None:
            if self.experts is None:
                self.experts = np.zeros((*self.history.shape, *experts.shape[1:]), dtype=np.int16)
            self.experts[rows, at] = experts
        self.fill[rows] = at + 1
        self.token[rows] = drawn.token
        self.response_index[rows] += np.uint64(1)
        self.position[rows] += 1

    def rows_to_inspect(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the rows to inspect after `append`, and which of them have ended by stop id, length or failure."""
        token = self.token[rows]
        ended = (token[:, None] == self.stops[rows]).any(1) | (self.position[rows] >= self.last[rows]) | (token < 0)
        look = ended | (self.fill[rows] >= self.every) | self.watched[rows]
        return rows[look], ended[look]

    def flush(self, sequence: Sequence) -> TokenChunk | None:
        """Move a row's tokens from the history to the sequence, and return them as a chunk; None if there are none."""
        row, count = sequence.row, int(self.fill[sequence.row])
        if not count:
            return None
        request, start = sequence.request, sequence.reported
        tokens = self.history[row, :count]
        experts = self.experts if request.record_experts else None
        chunk = TokenChunk.of(
            request.trajectory,
            tokens,
            self.logprobs[row, :count],
            version=sequence.version,
            start=start,
            attempt=request.attempt,
            experts=None if experts is None else experts[row, :count],
            model_logprobs=self.model_logprobs[row, :count],
            prompt_experts=sequence.prompt_experts if start == 0 else None,
        )
        sequence.tokens[sequence.length : sequence.length + count] = tokens
        sequence.length += count
        sequence.reported += count
        # Each of these tokens was sampled from the KV of the one before it; only the last is not computed yet.
        sequence.computed = sequence.length - 1
        self.fill[row] = 0
        return chunk

    def decode_rows(self) -> npt.NDArray[np.int64]:
        """Indices of the rows that decode."""
        return self._all[: self.decoding]

    def longest_waiting(self, rows: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
        """Choose at most `most` of these rows, those that decoded longest ago, for the next turn."""
        if most < len(rows):
            rows = np.sort(rows[np.argsort(self.turn[rows], kind="stable")[:most]])
        self._turns += 1
        self.turn[rows] = self._turns
        return rows

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        for name in self._columns:
            column = getattr(self, name)
            column[a], column[b] = column[b], column[a]
        for name in (*self._wide, *(() if self.experts is None else ("experts",))):
            wide = getattr(self, name)
            wide[[a, b]] = wide[[b, a]]
        self.rows.table[[a, b]] = self.rows.table[[b, a]]
        self.settings.swap(a, b)
        first, second = self.sequences[a], self.sequences[b]
        self.sequences[a], self.sequences[b] = second, first
        first.row, second.row = b, a
