"""The requests inside vLLM: submitted with their tokens and KV, and withdrawn.

Invariant: a sequence has a name exactly while it is inside vLLM. It gets another name each time it is submitted, so
that a late output of an earlier submission is not taken for one of the current submission.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora_rl.engine.vllm.core import Core
from dora_rl.engine.vllm.sequence import VllmSequence

if TYPE_CHECKING:
    from dora_rl.engine.vllm.connector import Kv


class ActiveRequests:
    """The sequences inside vLLM, by name."""

    def __init__(self, core: Core, adapter: Callable[[int], Any]) -> None:
        self.by_name: dict[str, VllmSequence] = {}
        self._core = core
        self._adapter = adapter
        self._names = 0

    def __len__(self) -> int:
        return len(self.by_name)

    def add(self, sequence: VllmSequence, kv: Kv | None = None) -> None:
        """Submit the tokens so far to vLLM, with their KV if there is any."""
        self._names += 1
        request = sequence.request
        name = f"{request.trajectory}.{request.attempt}.{self._names}"
        most = sequence.limit - len(sequence.tokens)
        if kv is not None and self._core.transit is not None:
            self._core.transit.arriving[name] = kv
        adapter = self._adapter(sequence.slot)
        sequence.internal_name = self._core.add(name, sequence.tokens.tolist(), most, request.sampling, adapter)
        sequence.name, sequence.computed = name, 0
        self.by_name[name] = sequence

    def withdraw(self, leaving: list[VllmSequence], *, with_kv: bool = False) -> dict[VllmSequence, Kv | None]:
        """Withdraw sequences from vLLM; return their KV as far as vLLM has it."""
        transit = self._core.transit if with_kv else None
        names = [sequence.name for sequence in leaving if sequence.name is not None]
        if transit is not None:
            transit.wanted.update(sequence.internal_name for sequence in leaving if sequence.name is not None)
        if names:
            self._core.abort(names)
        for sequence in leaving:
            self.forget(sequence)
        if transit is None:
            return dict.fromkeys(leaving)
        transit.wanted.clear()
        return {sequence: transit.left.pop(sequence.internal_name, None) for sequence in leaving}

    def forget(self, sequence: VllmSequence) -> None:
        """A sequence is no longer inside vLLM."""
        if sequence.name is not None:
            self.kv_used(sequence)
            del self.by_name[sequence.name]
            sequence.name = None

    def kv_used(self, sequence: VllmSequence) -> None:
        """Release the imported KV of a sequence: vLLM has copied it, or no longer needs it."""
        sequence.keep_alive = None
        if self._core.transit is not None and sequence.name is not None:
            self._core.transit.arriving.pop(sequence.name, None)
