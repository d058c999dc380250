"""The behaviour probe: it proves what a slot computes, not only which bytes it loaded.

With each version the trainer publishes its own log-probs of a few fixed token sequences. After loading, a slot computes
the same log-probs with the code path that it serves with, and serves only if the two agree. The two sides are
independent code (packed training forward; paged, batched inference, perhaps another engine), so the probe covers
everything between the trainer's weights and the engine's numbers: adapters and their scale, tied embeddings, casts,
positions, kernels, tensor parallelism.

Invariants:
- the sequences depend only on the seed and the vocabulary size, on every machine and Python version; a shorter context
  clips them, and since the models are causal, the log-probs of the remaining tokens are the same;
- the sequences differ in length, and both the last prefilled token and the decoded ones cross the boundaries of KV
  blocks of 16 and of 32 tokens.

**Tolerance.** Two correct computations differ by rounding. `TOLERANCE` depends on the coarser dtype of the two sides;
the largest difference over all tokens must be within it.

**Mixtures of experts.** Where two experts are nearly tied for the last place in a router's choice, rounding decides,
and another expert changes the log-probs of that token and of all later ones of its sequence by far more than rounding
does. Therefore the trainer publishes how many leading log-probs of each sequence are `firm`: no router had a near tie
before them. Those are compared like the log-probs of a dense model. Where some are not firm, the median difference over
all tokens must also be within the much wider `MEDIAN_TOLERANCE`: a few tokens that are routed to another expert do not
change the median, but weights of another version do. A fault in weights that all tokens use shows in the firm
log-probs; a fault inside a single expert shows only if the probe is routed to that expert.
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
"""Lengths of the sequences. Decoding their last `DECODED` tokens crosses position 16 in one and 32 in another."""
DECODED = 4
"""How many tokens at the end of each sequence an engine decodes one by one instead of prefilling them."""
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest allowed difference of a log-prob, in nats, by the coarser dtype of the two sides. Measured differences are
some tens of times smaller in float32 and a few times smaller in the other dtypes (`make bench-probe` prints them). The
margin is wide because a false alarm ends a run, and rounding differs by machine. A dtype that is missing here counts as
the coarsest."""
MEDIAN_TOLERANCE = {"float32": 0.1, "float16": 0.2, "bfloat16": 0.5}
"""Largest allowed median difference over all log-probs, where some come after a near tie of experts."""


def tolerance_of(*dtypes: str) -> float:
    """The largest allowed difference between two sides that compute in these dtypes."""
    return max(TOLERANCE.get(dtype, max(TOLERANCE.values())) for dtype in dtypes)


class ProbeResult(Record, frozen=True, kw_only=True):
    """How far a slot's log-probs are from the trainer's; recorded in the ledger."""

    digest: str
    """Digest of the probe that the slot was compared with."""
    difference: float
    """Largest difference of a log-prob, in nats."""
    tolerance: float


class _Gap(NamedTuple):
    """The difference between the two log-probs of one token."""

    size: float
    sequence: int
    token: int


class Probe(Record, frozen=True, kw_only=True):
    """The trainer's log-probs of the probe sequences for one version."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probs of all tokens but the first of each sequence, at temperature 1."""
    firm: tuple[int, ...]
    """How many leading log-probs of each sequence come before any near tie of experts; for a dense model, all."""
    dtype: str
    """The dtype that the trainer computed in."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.firm):
            raise ValueError("a probe has tokens, log-probs and a firm count for each sequence")
        for tokens, logprobs, firm in zip(self.tokens, self.logprobs, self.firm, strict=True):
            if len(tokens) != len(logprobs) + 1 or not 0 <= firm <= len(logprobs):
                raise ValueError("a sequence of a probe has a log-prob for each of its tokens but the first")
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("a log-prob of a probe is not a finite number")

    def encode(self) -> str:
        """Encode the probe as text for the header of a published version."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Probe:
        """Decode the text of a probe; raise `ValueError` if it is not one."""
        return msgspec.json.decode(text, type=cls)

    @property
    def digest(self) -> str:
        """The name of this probe in the ledger."""
        return hashlib.blake2b(self.encode().encode(), digest_size=8).hexdigest()

    def within(self, context: int) -> tuple[tuple[int, ...], ...]:
        """The sequences, clipped to a context length."""
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
        """Compare log-probs of the (clipped) sequences, computed in this dtype, with the trainer's.

        `tolerance` replaces the default one. Raise `ProbeError` if the difference is too large.
        """
        dtypes = (self.dtype, dtype)
        allowed = tolerance_of(*dtypes) if tolerance is None else tolerance
        firm, others = self._gaps(found)
        results = []
        if firm:
            results.append((firm[-1], allowed))
        if others:
            median_allowed = max(MEDIAN_TOLERANCE.get(one, max(MEDIAN_TOLERANCE.values())) for one in dtypes)
            results.append((statistics.median_low(sorted([*firm, *others])), max(allowed, median_allowed)))
        gap, limit = max(results, key=lambda result: result[0].size / result[1])
        if not gap.size <= limit:
            here, there = found[gap.sequence][gap.token - 1], self.logprobs[gap.sequence][gap.token - 1]
            which = f"in {dtype}" if dtype == self.dtype else f"between {self.dtype} and {dtype}"
            raise ProbeError(
                f"slot {slot} does not compute what the trainer published as version {version}: a log-prob of the "
                f"probe differs by {gap.size:.3g} (sequence {gap.sequence}, token {gap.token}: {here:.6g} here, "
                f"{there:.6g} {against}), and {limit:g} is allowed {which}; check how the engine handles the "
                "adapter, tied embeddings, dtypes and positions of this model, or set "
                "rollout.engine.probe_tolerance if the engine is meant to compute more coarsely"
            )
        return ProbeResult(digest=self.digest, difference=gap.size, tolerance=limit)

    def _gaps(self, found: Sequence[Sequence[float]]) -> tuple[list[_Gap], list[_Gap]]:
        """Differences of firm log-probs and of the others, smallest first; a NaN counts as an infinite difference."""
        firm: list[_Gap] = []
        others: list[_Gap] = []
        for index, logprobs in enumerate(found):
            for position, (here, there) in enumerate(zip(logprobs, self.logprobs[index], strict=False)):
                size = abs(float(here) - there)
                gap = _Gap(size if math.isfinite(size) else math.inf, index, position + 1)
                (firm if position < self.firm[index] else others).append(gap)
        return sorted(firm), sorted(others)


def sequences(seed: int, vocabulary: int, context: int) -> tuple[tuple[int, ...], ...]:
    """The token ids of the probe; sequences that the context clips to fewer than two tokens are left out."""
    made = []
    for index, length in enumerate(LENGTHS):
        size = min(length, context)
        if size >= 2:
            made.append(tuple(_token(seed, index, position, vocabulary) for position in range(size)))
    return tuple(made)


def _token(seed: int, index: int, position: int, vocabulary: int) -> int:
    digest = hashlib.blake2b(f"{seed} {index} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocabulary
