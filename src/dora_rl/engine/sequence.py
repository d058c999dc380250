"""A request while the engine has it.

`length` tokens are known (prompt, then response); the KV of the first `computed` of them is there: in `blocks`, or in
`host` while the sequence is pre-empted. It decodes when only its last token is left to compute, and prefills before.
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
        "version",
    )

    def __init__(self, request: Request, slot: int, arrival: int, limit: int, fingerprint: Fingerprint) -> None:
        self.request = request
        self.slot = slot
        self.arrival = arrival
        """Order among all requests; the newest is pre-empted first."""
        self.limit = limit
        """Length at which it ends."""
        self.version: Version = request.version
        self.fingerprint = fingerprint
        self.prompt_length = len(request.prompt)
        self.length = self.prompt_length + len(request.response)
        self.tokens = np.empty(max(limit, self.length), dtype=np.int64)
        self.tokens[: self.length] = request.prompt + request.response
        self.reported = len(request.response)
        """Response tokens that have been reported."""
        self.computed = 0
        # At the first attempt there is no former place: what stands in the response is what an environment opened with.
        self.known = self.length - 1 if request.response and request.attempt else 0
        """Tokens whose KV existed once; computing one of them again counts as re-prefill."""
        self.blocks: list[int] = []
        self.host: torch.Tensor | None = None
        self.keep_alive: Any = None
        """Owner of the memory under `host`, where that is not the tensor itself."""
        self.prompt_experts: npt.NDArray[np.int16] | None = None
        """[prompt - 1, layers, experts used], -1 where not recorded; None if nothing was."""
        self.row = -1
        """Row in the batch of its slot, or -1."""

    @property
    def decodes(self) -> bool:
        return self.computed == self.length - 1

    @property
    def response(self) -> Any:
        """The response so far."""
        return self.tokens[self.prompt_length : self.length]

    def keep_experts(self, experts: npt.NDArray[np.int16]) -> None:
        """The experts of the tokens that are computed next; those of the prompt but its last token are kept."""
        if self.prompt_experts is None:
            self.prompt_experts = np.full((self.prompt_length - 1, *experts.shape[1:]), -1, dtype=np.int16)
        kept = self.prompt_experts[self.computed : self.computed + len(experts)]
        kept[:] = experts[: len(kept)]

    def forget_kv(self) -> None:
        """Its KV is gone; it will be computed again from the tokens."""
        self.known = max(self.known, self.computed)
        self.computed = 0
        self.host = self.keep_alive = None
