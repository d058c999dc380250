"""A request while the built-in engine has it.

`length` tokens are known (prompt, then response), and the KV of the first `computed` of them exists: in `blocks`, or in
`host` while the sequence is pre-empted. A sequence decodes when only its last token is left to compute; before that it
prefills.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from dora_rl.core.types import Fingerprint, Version
    from dora_rl.engine.requests import Request


class Sequence:
    """One running, waiting or pre-empted request."""

    __slots__ = (
        "arrival",
        "blocks",
        "computed",
        "fingerprint",
        "host",
        "keep_alive",
        "known",
        "length",
        "limit",
        "prompt_experts",
        "prompt_length",
        "reported",
        "request",
        "row",
        "slot",
        "tokens",
        "turn_start",
        "version",
    )

    def __init__(self, request: Request, slot: int, arrival: int, limit: int, fingerprint: Fingerprint) -> None:
        self.request = request
        self.slot = slot
        self.arrival = arrival
        """Order of arrival among all requests; the newest is pre-empted first."""
        self.limit = limit
        """Length at which the response ends."""
        self.version: Version = request.version
        self.fingerprint = fingerprint
        self.prompt_length = len(request.prompt)
        self.length = self.prompt_length + len(request.response)
        self.tokens = np.empty(max(limit, self.length), dtype=np.int64)
        self.tokens[: self.length] = request.prompt + request.response
        self.reported = len(request.response)
        """Response tokens that have been reported."""
        self.turn_start = request.turn_start
        """Response tokens before the current turn."""
        self.computed = 0
        # At the first attempt no engine has computed the request: its response is the opening of an environment.
        self.known = self.length - 1 if request.response and request.attempt else 0
        """Tokens whose KV existed once; computing one of them again counts as re-prefill."""
        self.blocks: list[int] = []
        self.host: torch.Tensor | None = None
        self.keep_alive: Any = None
        """Owner of the memory under `host`, where that is not the tensor itself."""
        self.prompt_experts: npt.NDArray[np.int16] | None = None
        """[prompt - 1, layers, experts used], -1 where not recorded; None if nothing was."""
        self.row = -1
        """Row in the batch of its slot; -1: it does not run."""

    @property
    def decodes(self) -> bool:
        """Whether only the last token is left to compute."""
        return self.computed == self.length - 1

    @property
    def response_length(self) -> int:
        """Tokens of the response so far."""
        return self.length - self.prompt_length

    @property
    def response(self) -> Any:
        """Tokens of the response, without those that are still in the batch's history."""
        return self.tokens[self.prompt_length : self.length]

    def keep_experts(self, experts: npt.NDArray[np.int16]) -> None:
        """Keep the experts of the next computed tokens, as far as they belong to the prompt without its last token."""
        if self.prompt_experts is None:
            self.prompt_experts = np.full((self.prompt_length - 1, *experts.shape[1:]), -1, dtype=np.int16)
        kept = self.prompt_experts[self.computed : self.computed + len(experts)]
        kept[:] = experts[: len(kept)]

    def forget_kv(self) -> None:
        """Drop the KV; it will be computed again from the tokens."""
        self.known = max(self.known, self.computed)
        self.computed = 0
        self.host = self.keep_alive = None
