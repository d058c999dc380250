"""What goes into an engine and what comes out of it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from dora_rl.core.errors import SamplingError
from dora_rl.core.events import AnyEvent
from dora_rl.core.types import Attempt, Fingerprint, Record, TrajectoryId, Version

if TYPE_CHECKING:
    from dora_rl.core.tokens import TokenChunk  # numpy takes 70 ms to import, and the command line reads this module


class Sampling(Record, frozen=True, kw_only=True):
    """How the next token is chosen."""

    max_tokens: int = 256
    """Most tokens of a response."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; the token that completes one is its last."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the response; the id is its last token."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int = 0
    """Part of the key of the random numbers, with the trajectory and the position."""

    def check(self, vocab: int) -> None:
        """Refuse settings that can't be sampled with."""
        if self.max_tokens < 1:
            raise SamplingError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise SamplingError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise SamplingError(f"top_k must be 0 or more, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise SamplingError(f"min_p must lie between 0 and 1, not {self.min_p}")
        if not 0 <= self.seed < 1 << 64:
            raise SamplingError(f"seed must lie between 0 and 2**64 - 1, not {self.seed}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab:
                raise SamplingError(f"logit_bias names the token {token}, but there are only {vocab}")
            if bias != bias or bias == float("inf"):
                raise SamplingError(f"logit_bias of token {token} must be a number or -inf, not {bias}")


class Request(Record, frozen=True, kw_only=True):
    """One trajectory to generate, or to continue from its tokens."""

    trajectory: TrajectoryId
    attempt: Attempt = 0
    version: Version
    prompt: tuple[int, ...]
    response: tuple[int, ...] = ()
    """Tokens already sampled, for a request that continues after its KV was lost."""
    turn_start: int = 0
    """Tokens of `response` before the current turn: stop strings in what came before do not end it."""
    sampling: Sampling = Sampling()
    parks: bool = False
    """After a stop the request waits, with its KV, for its environment; `extend` resumes it and `end` ends it."""
    record_experts: bool = False
    """Report the experts of each token (mixture-of-experts models)."""

    def length_limit(self, context: int) -> int:
        """The most tokens of prompt and response together, in an engine with this context."""
        return min(len(self.prompt) + self.sampling.max_tokens, context)


class FinishReason(StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """A stop id or a stop string."""
    LENGTH = "length"
    """The response has `max_tokens`."""
    CONTEXT = "context"
    """Prompt and response fill the context."""
    FAILED = "failed"
    """The model's logits are not finite numbers."""


class Finished(Record, frozen=True, kw_only=True):
    """A response has ended; all its tokens have been reported."""

    trajectory: TrajectoryId
    attempt: Attempt
    version: Version
    fingerprint: Fingerprint
    reason: FinishReason
    tokens: int
    """Length of the response."""


class StepOutput(Record, frozen=True, kw_only=True):
    """The result of one step of an engine."""

    chunks: tuple[TokenChunk, ...] = ()
    """New tokens, in order for each trajectory."""
    finished: tuple[Finished, ...] = ()
    events: tuple[AnyEvent, ...] = ()
    """For the orchestrator: slots loaded, KV pressure, trajectories generated."""
