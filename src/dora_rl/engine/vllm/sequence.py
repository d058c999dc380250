"""A request while vLLM has it, or while it is parked here for its environment."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora_rl.core.types import Fingerprint
    from dora_rl.engine.requests import Request


class VllmSequence:
    """One request and what it has said."""

    __slots__ = (
        "computed",
        "fingerprint",
        "inside",
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
    )

    def __init__(self, request: Request, slot: int, fingerprint: Fingerprint, context: int) -> None:
        self.request = request
        self.slot = slot
        self.fingerprint = fingerprint
        self.prompt_length = len(request.prompt)
        self.limit = request.length_limit(context)
        """Length at which it ends."""
        self.tokens = array("i", request.prompt + request.response)
        self.logprobs = array("f")
        """Of the tokens that are not reported yet."""
        self.reported = len(request.response)
        """Response tokens that have been reported."""
        self.name: str | None = None
        """What vLLM calls it now; None while it is parked."""
        self.inside = ""
        """What vLLM's inner parts call it."""
        self.keep_alive: Any = None
        """Owner of the memory in which its KV has come."""
        self.computed = 0
        """Tokens whose KV vLLM has computed for it; 0 until its first token has come."""
        # At the first attempt there is no former place: what stands in the response is what an environment opened with.
        self.known = len(self.tokens) - 1 if request.response and request.attempt else 0
        """Tokens whose KV existed once; computing one of them again counts as re-prefill."""

    @property
    def said(self) -> int:
        """Tokens of the response."""
        return len(self.tokens) - self.prompt_length

    @property
    def response(self) -> array[int]:
        return self.tokens[self.prompt_length :]
