"""The behaviour probe through vLLM, by ordinary requests beside those that run.

Prefill is compared with the trainer: a request returns the log-probs of its prompt. Decoding can't be made to sample
given tokens, so it is compared with prefill: what each request sampled after its prompt becomes part of the prompt of a
second request, and the log-probs of these tokens from decoding and from prefill must agree as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dora_rl.core.probe import DECODED, Probe, ProbeResult

if TYPE_CHECKING:
    from dora_rl.core.types import SlotId, Version
    from dora_rl.engine.vllm.core import Core, Output

_NAME = "probe"


class VllmProber:
    """Compares vLLM's log-probs with those that the trainer published; `others` gets outputs of other requests."""

    def __init__(self, core: Core, tolerance: float | None, others: Callable[[Output], None]) -> None:
        self._core = core
        self._tolerance = tolerance
        self._others = others
        self._count = 0

    def check(self, probe: Probe | None, adapter: Any, slot: SlotId, version: Version) -> ProbeResult | None:
        """Return the difference, or None without a probe; one above the tolerance is a `ProbeError`."""
        if probe is None:
            return None
        given: dict[str, Any] = {
            "dtype": self._core.dtype,
            "tolerance": self._tolerance,
            "slot": slot,
            "version": version,
        }
        tokens = probe.within(self._core.context - DECODED - 1)
        outputs = self._run(tokens, DECODED, adapter)
        result = probe.compare([one.prompt for one in outputs], **given)
        longer = tuple((*prompt, *one.tokens) for prompt, one in zip(tokens, outputs, strict=True))
        prefilled = [one.prompt for one in self._run(longer, 1, adapter)]
        whole = [firm == len(logprobs) for firm, logprobs in zip(probe.firm, probe.logprobs, strict=True)]
        again = Probe(
            tokens=longer,
            logprobs=tuple(prefilled),
            firm=tuple(len(prefilled[i]) if whole[i] else probe.firm[i] for i in range(len(longer))),
            dtype=probe.dtype,
        )
        decoded = [(*one.prompt, *one.logprobs) for one in outputs]
        second = again.compare(decoded, **given, against="when prefilled")
        return msgspec.structs.replace(result, difference=max(result.difference, second.difference))

    def _run(self, prompts: Sequence[Sequence[int]], most: int, adapter: Any) -> list[Output]:
        names = [f"{_NAME}-{self._count + index}" for index in range(len(prompts))]
        self._count += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self._core.add_probe(name, list(prompt), most, adapter)
        done: dict[str, Output] = {}
        while len(done) < len(names):
            for output in self._core.step():
                if output.name.startswith(f"{_NAME}-"):
                    done[output.name] = output
                else:
                    self._others(output)
        return [done[name] for name in names]
