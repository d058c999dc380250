"""Tokens of a response, in the one form that they have from the engine to the trainer, in memory and on the wire.

Invariants:
- a chunk is a run of consecutive tokens of one trajectory: all sampled by one version, or all from the environment;
- arrays are stored as little-endian bytes, so a chunk is encoded, stored and decoded without a conversion; the
  properties are read-only views of those bytes;
- `start` is the index of the first token in the response, so chunks of a trajectory join without a gap or overlap.

Dimensions: N tokens, L layers with routed experts, E experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dora_rl.core.types import Attempt, Record, TrajectoryId, Version

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

TOKEN_BYTES = 4
"""Size of a token id, and of a log-prob."""


class TokenChunk(Record, frozen=True, kw_only=True):
    """Consecutive tokens of one response."""

    trajectory: TrajectoryId
    attempt: Attempt = 0
    version: Version
    """The version that sampled them; for tokens of the environment, the version of the trajectory."""
    start: int
    """Index of the first token in the response."""
    token_data: bytes
    """int32 [N]"""
    logprob_data: bytes
    """float32 [N]: log-probs under the distribution that was sampled from, after temperature, bias and truncation."""
    sampled: bool = True
    """False: the environment produced the tokens; they are context and are not trained."""
    expert_data: bytes = b""
    """int16 [N, L, E]: the experts of the forward pass that produced the logits of each token; empty: not recorded."""
    expert_shape: tuple[int, int] = (0, 0)
    """L and E."""
    model_logprob_data: bytes = b""
    """float32 [N]: log-probs at this temperature with no bias and no truncation; empty: not recorded."""
    prompt_expert_data: bytes = b""
    """int16 [prompt tokens - 1, L, E], in the first chunk of a response: -1 where not computed here."""

    @classmethod
    def of(
        cls,
        trajectory: TrajectoryId,
        tokens: ArrayLike,
        logprobs: ArrayLike | None = None,
        *,
        version: Version,
        start: int = 0,
        attempt: Attempt = 0,
        sampled: bool = True,
        experts: Any = None,
        model_logprobs: ArrayLike | None = None,
        prompt_experts: Any = None,
    ) -> TokenChunk:
        """Make a chunk from arrays. Tokens of the environment have no log-probs and get zeros."""
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        chosen = np.zeros(len(ids), dtype=np.float32) if logprobs is None else logprobs
        recorded = experts if experts is not None else prompt_experts
        return cls(
            trajectory=trajectory,
            attempt=attempt,
            version=version,
            start=start,
            token_data=ids.tobytes(),
            logprob_data=_bytes(chosen, np.float32),
            sampled=sampled,
            expert_data=_bytes(experts, np.int16),
            expert_shape=(0, 0) if recorded is None else recorded.shape[1:],
            model_logprob_data=_bytes(model_logprobs, np.float32),
            prompt_expert_data=_bytes(prompt_experts, np.int16),
        )

    def __len__(self) -> int:
        return len(self.token_data) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Index in the response of the token after the last one."""
        return self.start + len(self)

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self.token_data, dtype=np.int32)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return np.frombuffer(self.logprob_data, dtype=np.float32)

    @property
    def model_logprobs(self) -> NDArray[np.float32]:
        return np.frombuffer(self.model_logprob_data, dtype=np.float32)

    @property
    def experts(self) -> NDArray[np.int16] | None:
        return self._experts(self.expert_data)

    @property
    def prompt_experts(self) -> NDArray[np.int16] | None:
        return self._experts(self.prompt_expert_data)

    def for_training(self) -> TokenChunk:
        """The chunk without the fields that training does not read."""
        if not self.model_logprob_data and not self.prompt_expert_data:
            return self
        return msgspec.structs.replace(self, model_logprob_data=b"", prompt_expert_data=b"")

    def _experts(self, data: bytes) -> NDArray[np.int16] | None:
        return np.frombuffer(data, dtype=np.int16).reshape(-1, *self.expert_shape) if data else None


def joined(chunks: Iterable[TokenChunk]) -> Iterator[TokenChunk]:
    """Join neighbouring chunks wherever one continues the other.

    A chunk that differs from the one before it in trajectory, attempt, version, origin or recorded fields, or that does
    not start where that one ends, stays apart.
    """
    run: list[TokenChunk] = []
    for chunk in chunks:
        if run and not _continues(run[-1], chunk):
            yield _concatenated(run)
            run = []
        run.append(chunk)
    if run:
        yield _concatenated(run)


def _continues(before: TokenChunk, chunk: TokenChunk) -> bool:
    return (
        chunk.start == before.start + len(before.token_data) // TOKEN_BYTES
        and chunk.trajectory == before.trajectory
        and chunk.attempt == before.attempt
        and chunk.version == before.version
        and chunk.sampled == before.sampled
        and chunk.expert_shape == before.expert_shape
        and not chunk.prompt_expert_data
        and bool(chunk.expert_data) == bool(before.expert_data)
        and bool(chunk.model_logprob_data) == bool(before.model_logprob_data)
    )


def _concatenated(run: list[TokenChunk]) -> TokenChunk:
    if len(run) == 1:
        return run[0]
    return msgspec.structs.replace(
        run[0],
        token_data=b"".join([chunk.token_data for chunk in run]),
        logprob_data=b"".join([chunk.logprob_data for chunk in run]),
        expert_data=b"".join([chunk.expert_data for chunk in run]),
        model_logprob_data=b"".join([chunk.model_logprob_data for chunk in run]),
    )


def _bytes(values: Any, dtype: Any) -> bytes:
    return b"" if values is None else np.ascontiguousarray(values, dtype=dtype).tobytes()
