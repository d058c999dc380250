"""A request while vLLM computes it, or while it is parked here for its environment."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_rl.core.tokens import TokenChunk

if TYPE_CHECKING:
    from dora_rl.core.types import Fingerprint, Version
    from dora_rl.engine.requests import Request


class VllmSequence:
    """One request, and the tokens that vLLM has sampled for it."""

    __slots__ = (
        "computed",
        "fingerprint",
        "internal_name",
        "keep_alive",
        "known",
        "limit",
        "logprobs",
        "name",
        "prompt_length",
        "reported",
        "request",
        "slot",
        "tokens",
        "turn_start",
    )

    def __init__(self, request: Request, slot: int, fingerprint: Fingerprint, context: int) -> None:
        self.request = request
        self.slot = slot
        self.fingerprint = fingerprint
        self.prompt_length = len(request.prompt)
        self.limit = request.length_limit(context)
        """Length at which the response ends."""
        self.tokens = array("i", request.prompt + request.response)
        self.logprobs = array("f")
        """Log-probs of the tokens that are not reported yet."""
        self.reported = len(request.response)
        """Response tokens that have been reported."""
        self.turn_start = request.turn_start
        """Response tokens before the current turn."""
        self.name: str | None = None
        """Name of the request in vLLM's interface; None while it is parked."""
        self.internal_name = ""
        """Name of the request in vLLM's scheduler."""
        self.keep_alive: Any = None
        """Owner of the memory that its imported KV is in."""
        self.computed = 0
        """Tokens whose KV vLLM has computed for it; 0 before its first token."""
        # At the first attempt no engine has computed the request: its response is the opening of an environment.
        self.known = len(self.tokens) - 1 if request.response and request.attempt else 0
        """Tokens whose KV existed once; computing one of them again counts as re-prefill."""

    @property
    def version(self) -> Version:
        """The version that samples it."""
        return self.request.version

    @property
    def response_length(self) -> int:
        """Tokens of the response."""
        return len(self.tokens) - self.prompt_length

    @property
    def response(self) -> array[int]:
        """Tokens of the response."""
        return self.tokens[self.prompt_length :]

    def flush(self) -> TokenChunk:
        """Return the tokens that are not reported yet, and count them as reported."""
        request, sampling = self.request, self.request.sampling
        # vLLM reports log-probs of the distribution that it sampled from: they are the model's own only without
        # truncation and bias.
        untruncated = sampling.top_p == 1 and not (sampling.top_k or sampling.min_p or sampling.logit_bias)
        logprobs = np.array(self.logprobs)
        chunk = TokenChunk.of(
            request.trajectory,
            self.tokens[self.prompt_length + self.reported :],
            logprobs,
            version=request.version,
            start=self.reported,
            attempt=request.attempt,
            model_logprobs=logprobs if untruncated else None,
        )
        self.reported += len(chunk)
        del self.logprobs[:]
        return chunk
