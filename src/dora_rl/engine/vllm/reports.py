"""What the engine has to tell: tokens before what follows from them, each with the version that it comes from."""

from __future__ import annotations

from typing import Any

import numpy as np

from dora_rl.core.events import AnyEvent, Generated, Parked, TrajectoryFailed
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import InstanceId
from dora_rl.engine.requests import Finished, FinishReason, StepOutput
from dora_rl.engine.vllm.sequence import VllmSequence


class Reports:
    """Gathered until they are taken."""

    def __init__(self, instance: InstanceId) -> None:
        self._instance = instance
        self._chunks: list[TokenChunk] = []
        self._finished: list[Finished] = []
        self.events: list[AnyEvent] = []

    def __bool__(self) -> bool:
        return bool(self._chunks or self._finished or self.events)

    def take(self) -> StepOutput:
        """All that is there."""
        output = StepOutput(chunks=tuple(self._chunks), finished=tuple(self._finished), events=tuple(self.events))
        self._chunks, self._finished, self.events = [], [], []
        return output

    def flush(self, sequence: VllmSequence) -> None:
        """What was sampled since the last time."""
        count = sequence.said - sequence.reported
        if not count:
            return
        request, sampling = sequence.request, sequence.request.sampling
        # vLLM reports log-probs of the distribution that it sampled from: they are the model's own only without
        # truncation and bias.
        untruncated = sampling.top_p == 1 and not (sampling.top_k or sampling.min_p or sampling.logit_bias)
        logprobs = np.array(sequence.logprobs)
        self._chunks.append(
            TokenChunk.of(
                request.trajectory,
                sequence.tokens[-count:],
                logprobs,
                version=request.version,
                start=sequence.reported,
                attempt=request.attempt,
                model_logprobs=logprobs if untruncated else None,
            )
        )
        sequence.reported += count
        del sequence.logprobs[:]

    def ended(self, sequence: VllmSequence, reason: FinishReason) -> None:
        """A turn is over."""
        self._finished.append(Finished(**_stamp(sequence), reason=reason, tokens=sequence.said))

    def parked(self, sequence: VllmSequence, kv_tokens: int) -> None:
        """It waits for its environment."""
        request = sequence.request
        self.events.append(Parked(trajectory=request.trajectory, attempt=request.attempt, kv_tokens=kv_tokens))

    def generated(self, sequence: VllmSequence, kv_tokens: int) -> None:
        """Its last token is there."""
        stamp = _stamp(sequence)
        self.events.append(Generated(**stamp, instance=self._instance, tokens=sequence.said, kv_tokens=kv_tokens))

    def failed(self, sequence: VllmSequence, reason: str) -> None:
        """It can't be finished."""
        self.events.append(TrajectoryFailed(trajectory=sequence.request.trajectory, reason=reason))


def _stamp(sequence: VllmSequence) -> dict[str, Any]:
    return {
        "trajectory": sequence.request.trajectory,
        "attempt": sequence.request.attempt,
        "version": sequence.request.version,
        "fingerprint": sequence.fingerprint,
    }
