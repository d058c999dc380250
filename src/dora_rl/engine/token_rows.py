"""The tokens of one forward pass, in buffers that are allocated once.

A row is one token of one sequence. Rows of one sequence are adjacent, in the order of their positions. A decoding
sequence has one row, a prefilling one has several; only rows listed in `logit_row` get logits.
"""

from __future__ import annotations

import numpy as np


class TokenRows:
    """Static buffers for at most `limit` rows, and the number of rows in use."""

    def __init__(self, limit: int, sequences: int, max_blocks: int) -> None:
        self.count = 0
        self.logit_count = 0
        self.token = np.zeros(limit, dtype=np.int64)
        self.position = np.zeros(limit, dtype=np.int32)
        self.sequence = np.zeros(limit, dtype=np.int32)
        """Row of `table` that belongs to the token's sequence."""
        self.logit_row = np.zeros(limit, dtype=np.int32)
        self.table = np.zeros((sequences, max_blocks), dtype=np.int32)
        """Block ids of each sequence, in order."""

    @property
    def limit(self) -> int:
        """Rows that fit."""
        return len(self.token)
