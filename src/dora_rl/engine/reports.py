"""What an engine has to report, gathered until the next `step` or `drain` returns it.

Invariant: tokens are added before the event that follows from them, and all reports of a response carry its version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dora_rl.core.events import AnyEvent, Generated, Parked, TrajectoryFailed
from dora_rl.core.tokens import TokenChunk
from dora_rl.engine.requests import Finished, FinishReason, StepOutput

if TYPE_CHECKING:
    from dora_rl.core.types import Fingerprint, InstanceId, Version
    from dora_rl.engine.requests import Request


class ReportedSequence(Protocol):
    """What reports need to know about a request."""

    request: Request
    fingerprint: Fingerprint

    @property
    def version(self) -> Version:
        """The version that sampled its last token."""
        ...

    @property
    def response_length(self) -> int:
        """Tokens of the response so far."""
        ...


class Reports:
    """Chunks, ends of responses and events that have not been returned yet."""

    def __init__(self, instance: InstanceId) -> None:
        self._instance = instance
        self._chunks: list[TokenChunk] = []
        self._finished: list[Finished] = []
        self._events: list[AnyEvent] = []

    def __bool__(self) -> bool:
        return bool(self._chunks or self._finished or self._events)

    def take(self) -> StepOutput:
        """Return everything gathered so far, and begin again with nothing."""
        output = StepOutput(chunks=tuple(self._chunks), finished=tuple(self._finished), events=tuple(self._events))
        self._chunks, self._finished, self._events = [], [], []
        return output

    def chunk(self, chunk: TokenChunk) -> None:
        """New tokens of a response."""
        self._chunks.append(chunk)

    def event(self, event: AnyEvent) -> None:
        """Something that the orchestrator must know."""
        self._events.append(event)

    def finished(self, sequence: ReportedSequence, reason: FinishReason) -> None:
        """A response, or one turn of it, has ended."""
        self._finished.append(Finished(**_stamp(sequence), reason=reason, tokens=sequence.response_length))

    def parked(self, sequence: ReportedSequence, kv_tokens: int) -> None:
        """A request waits for its environment."""
        request = sequence.request
        self._events.append(Parked(trajectory=request.trajectory, attempt=request.attempt, kv_tokens=kv_tokens))

    def generated(self, sequence: ReportedSequence, kv_tokens: int) -> None:
        """A response is complete."""
        self._events.append(
            Generated(**_stamp(sequence), instance=self._instance, tokens=sequence.response_length, kv_tokens=kv_tokens)
        )

    def failed(self, sequence: ReportedSequence, reason: str) -> None:
        """A response can't be completed."""
        self._events.append(TrajectoryFailed(trajectory=sequence.request.trajectory, reason=reason))


def _stamp(sequence: ReportedSequence) -> dict[str, Any]:
    """Which attempt was served, and by which weights."""
    return {
        "trajectory": sequence.request.trajectory,
        "attempt": sequence.request.attempt,
        "version": sequence.version,
        "fingerprint": sequence.fingerprint,
    }
