"""The requests that vLLM has now: handed to it with their tokens and KV, and taken back.

Invariant: a sequence has a name exactly while vLLM has it; each time it is handed over it gets another one, so that
what vLLM says of a former time is not taken for the present.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora_rl.engine.vllm.core import Core
from dora_rl.engine.vllm.sequence import VllmSequence

if TYPE_CHECKING:
    from dora_rl.engine.vllm.connector import Kv


class ActiveRequests:
    """What vLLM works on."""

    def __init__(self, core: Core, adapter: Callable[[int], Any]) -> None:
        self.by_name: dict[str, VllmSequence] = {}
        self._core = core
        self._adapter = adapter
        self._names = 0

    def __len__(self) -> int:
        return len(self.by_name)

    def add(self, sequence: VllmSequence, kv: Kv | None = None) -> None:
        """Hand the tokens so far to vLLM, with the KV that there is."""
        self._names += 1
        request = sequence.request
        name = f"{request.trajectory}.{request.attempt}.{self._names}"
        most = sequence.limit - len(sequence.tokens)
        if kv is not None and self._core.transit is not None:
            self._core.transit.arriving[name] = kv
        adapter = self._adapter(sequence.slot)
        sequence.inside = self._core.add(name, sequence.tokens.tolist(), most, request.sampling, adapter)
        sequence.name, sequence.computed = name, 0
        self.by_name[name] = sequence

    def withdraw(self, leaving: list[VllmSequence], *, with_kv: bool = False) -> dict[VllmSequence, Kv | None]:
        """Take sequences back from vLLM, and what KV of them can be had."""
        transit = self._core.transit if with_kv else None
        names = [sequence.name for sequence in leaving if sequence.name is not None]
        if transit is not None:
            transit.wanted.update(sequence.inside for sequence in leaving if sequence.name is not None)
        if names:
            self._core.abort(names)
        for sequence in leaving:
            self.gone(sequence)
        if transit is None:
            return dict.fromkeys(leaving)
        transit.wanted.clear()
        return {sequence: transit.left.pop(sequence.inside, None) for sequence in leaving}

    def gone(self, sequence: VllmSequence) -> None:
        """vLLM no longer has it."""
        if sequence.name is not None:
            self.placed(sequence)
            del self.by_name[sequence.name]
            sequence.name = None

    def placed(self, sequence: VllmSequence) -> None:
        """KV that has come along is no longer needed."""
        sequence.keep_alive = None
        if self._core.transit is not None and sequence.name is not None:
            self._core.transit.arriving.pop(sequence.name, None)
