"""The behaviour probe: proof of what a slot computes, not only of the bytes that it loaded.

With each version the trainer publishes its own log-probs of a few fixed token sequences. A slot computes the same
log-probs after loading, in the way that it will serve, and serves only if the two agree. Both sides are independent
code (packed training forward; paged, batched inference, perhaps another engine), so the probe covers all between the
trainer's weights and the engine's numbers: adapters and their scale, tied embeddings, casts, positions, kernels,
tensor parallelism.

Invariants:
- the sequences follow from (seed, vocabulary size) alone, on every machine and Python version; a shorter context
  clips them, and since the models are causal, the log-probs of what is left are the same;
- lengths are ragged, and both the last prefilled token and the decoded ones cross the boundaries of KV blocks of 16
  and of 32 tokens.

**Tolerance.** Two sound computations differ by rounding. `TOLERANCE` is by dtype, the coarser of the two sides; the
largest difference over all tokens must be within it.

**Mixtures of experts.** Where two experts are nearly tied for the last place in a router's choice, rounding decides,
and another expert changes the log-probs of that token and of all later ones of its sequence by far more than rounding
does. So the trainer says how many leading log-probs of each sequence are `firm`: no router had a near tie before them.
Those are compared like any dense model's. Where some are not firm, the median difference over all tokens must also be
within the much wider `LOOSE`: a few tokens that went to another expert do not move it, weights of another version do.
A fault of weights that all tokens go through shows in the firm ones; one inside a single expert shows only if the
probe is routed there.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dora_rl.core.errors import ProbeError
from dora_rl.core.types import Record, Version

LENGTHS = (3, 9, 18, 34)
"""Tokens of the sequences: with `DECODED` behind them, decoding crosses position 16 in one and 32 in another."""
DECODED = 4
"""Tokens at the end of each sequence that an engine computes one by one, as it decodes."""
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest difference of a log-prob between two sound computations, in nats, by the coarser dtype of the two. Measured
differences are some tens of times smaller in float32 and a few times in the others (`make bench-probe` prints them):
a false alarm ends a run, and rounding differs by machine. A dtype that is not here counts as the coarsest."""
LOOSE = {"float32": 0.1, "float16": 0.2, "bfloat16": 0.5}
"""The same for the median over all log-probs, where some lie behind a near tie of experts."""


def tolerance_of(*dtypes: str) -> float:
    """What two sides that compute in these dtypes may differ by."""
    return max(TOLERANCE.get(dtype, max(TOLERANCE.values())) for dtype in dtypes)


class ProbeResult(Record, frozen=True, kw_only=True):
    """How far a slot is from the trainer; written into the ledger."""

    digest: str
    """Of the probe that it was compared with."""
    difference: float
    """Largest difference of a log-prob, in nats."""
    tolerance: float


class _Gap(NamedTuple):
    """Two log-probs of one token."""

    size: float
    sequence: int
    token: int


class Probe(Record, frozen=True, kw_only=True):
    """What the trainer computed for a version."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Of all tokens but the first of each sequence, at temperature 1."""
    firm: tuple[int, ...]
    """How many leading log-probs of each sequence are before any near tie of experts; of a dense model all are."""
    dtype: str
    """That the trainer computed in."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.firm):
            raise ValueError("a probe has tokens, log-probs and a firm count for each sequence")
        for tokens, logprobs, firm in zip(self.tokens, self.logprobs, self.firm, strict=True):
            if len(tokens) != len(logprobs) + 1 or not 0 <= firm <= len(logprobs):
                raise ValueError("a sequence of a probe has a log-prob for each of its tokens but the first")
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("a log-prob of a probe is not a finite number")

    def encode(self) -> str:
        """As text, for the header of a published version."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Probe:
        """From its text; `ValueError` if it is none."""
        return msgspec.json.decode(text, type=cls)

    @property
    def digest(self) -> str:
        """Names it in the ledger."""
        return hashlib.blake2b(self.encode().encode(), digest_size=8).hexdigest()

    def within(self, context: int) -> tuple[tuple[int, ...], ...]:
        """The sequences, clipped to a context."""
        clipped = (tokens[:context] for tokens in self.tokens)
        return tuple(tokens for tokens in clipped if len(tokens) >= 2)

    def compare(
        self,
        found: Sequence[Sequence[float]],
        *,
        dtype: str,
        tolerance: float | None,
        slot: Any,
        version: Version,
        against: str = "in the trainer",
    ) -> ProbeResult:
        """How far log-probs of (clipped) sequences, computed in this dtype, are from the trainer's.

        Another than the default tolerance may be given. Too far is a `ProbeError`.
        """
        dtypes = (self.dtype, dtype)
        allowed = tolerance_of(*dtypes) if tolerance is None else tolerance
        firm, others = self._gaps(found)
        results = []
        if firm:
            results.append((firm[-1], allowed))
        if others:
            loose = max(LOOSE.get(one, max(LOOSE.values())) for one in dtypes)
            results.append((statistics.median_low(sorted([*firm, *others])), max(allowed, loose)))
        gap, limit = max(results, key=lambda result: result[0].size / result[1])
        if not gap.size <= limit:
            here, there = found[gap.sequence][gap.token - 1], self.logprobs[gap.sequence][gap.token - 1]
            which = f"in {dtype}" if dtype == self.dtype else f"between {self.dtype} and {dtype}"
            raise ProbeError(
                f"slot {slot} does not compute what the trainer published as version {version}: a log-prob of the "
                f"probe differs by {gap.size:.3g} (sequence {gap.sequence}, token {gap.token}: {here:.6g} here, "
                f"{there:.6g} {against}), and {limit:g} is allowed {which}; look at what the engine "
                "does with the adapter, tied embeddings, dtypes and positions of this model, or set "
                "rollout.engine.probe_tolerance if the engine is meant to compute more coarsely"
            )
        return ProbeResult(digest=self.digest, difference=gap.size, tolerance=limit)

    def _gaps(self, found: Sequence[Sequence[float]]) -> tuple[list[_Gap], list[_Gap]]:
        """Differences of firm log-probs and of the others, smallest first; what is not a number differs infinitely."""
        firm: list[_Gap] = []
        others: list[_Gap] = []
        for index, said in enumerate(found):
            for place, (here, there) in enumerate(zip(said, self.logprobs[index], strict=False)):
                size = abs(float(here) - there)
                gap = _Gap(size if math.isfinite(size) else math.inf, index, place + 1)
                (firm if place < self.firm[index] else others).append(gap)
        return sorted(firm), sorted(others)


def sequences(seed: int, vocabulary: int, context: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of the probe; sequences that a context clips to fewer than two tokens are left out."""
    made = []
    for index, length in enumerate(LENGTHS):
        size = min(length, context)
        if size >= 2:
            made.append(tuple(_token(seed, index, place, vocabulary) for place in range(size)))
    return tuple(made)


def _token(seed: int, index: int, place: int, vocabulary: int) -> int:
    digest = hashlib.blake2b(f"{seed} {index} {place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocabulary
