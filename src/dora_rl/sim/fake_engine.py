"""A fake engine for seeded schedules: it executes one command each time that the runtime asks it to.

The engine itself checks promise C1: it records the version that served each token and rejects commands that contradict
the state of its slots. Commands wait in `inbox` in the order in which they were given; bundles of moved requests arrive
in the same queue. Its reports go to the runtime, which may deliver them at any time and in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Attempt, GroupId, InstanceId, InstanceSpec, SlotId, TrajectoryId, Version
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.sim.invariants import require

_KV_EACH = 16
"""KV tokens of a fake request."""
Choose = Callable[[int], int]
"""Returns a number below its argument."""


def fingerprint(version: Version) -> str:
    return f"weights-{version}"


class EngineContext(Protocol):
    """What a fake engine needs from the runtime around it."""

    config: ControlConfig
    choose: Choose
    tools: bool
    """Whether requests park now and then."""

    def report(self, event: e.Event) -> None:
        """Queue a report for the orchestrator."""
        ...

    def send(self, instance: InstanceId, message: FakeBundle) -> None:
        """Send requests to another engine."""
        ...

    def admitted_version(self, group: GroupId) -> Version:
        """The version under which a group was admitted."""
        ...


@dataclass(slots=True)
class FakeRequest:
    """A trajectory on a fake engine."""

    attempt: Attempt
    slot: int
    served: list[Version] = field(default_factory=list)
    parked: bool = False


@dataclass(slots=True)
class FakeBundle:
    """Requests on their way to an instance."""

    move: c.Move
    requests: dict[TrajectoryId, FakeRequest]


class FakeInstance:
    """One engine."""

    def __init__(self, spec: InstanceSpec, context: EngineContext) -> None:
        self.spec = spec
        self.inbox: deque[c.Command | FakeBundle] = deque()
        self.slots: list[Version | None] = [None] * spec.slots
        self.requests: dict[TrajectoryId, FakeRequest] = {}
        self.silent = False
        self._context = context

    @property
    def kv_tokens(self) -> int:
        return _KV_EACH * len(self.requests)

    def execute_next(self) -> None:
        """Execute the next command."""
        message = self.inbox.popleft()
        match message:
            case c.LoadVersion():
                self._load(message)
            case c.UnloadSlot():
                on_slot = self._on(message.slot)
                require(not on_slot, f"{message.slot} is unloaded under requests {on_slot}")
                self.slots[message.slot.number] = None
            case c.StartGroup():
                size = self._context.config.group_size
                for trajectory in range(message.group * size, (message.group + 1) * size):
                    self._begin(trajectory, 0, message.slot, message.version)
            case c.Resume():
                self._begin(message.trajectory, message.attempt, message.slot, message.version)
            case c.Move():
                self._export(message)
            case c.Abort():
                request = self.requests.get(message.trajectory)
                if request is not None and request.attempt == message.attempt:
                    del self.requests[message.trajectory]
            case FakeBundle():
                self._import(message)
            case _:
                raise AssertionError(f"an engine got {message}")

    def decode(self) -> dict[TrajectoryId, int]:
        """Sample a token for every request that can continue; return how many each request has."""
        for request in self.requests.values():
            version = self.slots[request.slot]
            if not request.parked and version is not None:
                request.served.append(version)
        return {trajectory: len(request.served) for trajectory, request in self.requests.items()}

    def drop_requests(self) -> bool:
        """Lose the next command, if it starts or resumes requests, without a report."""
        if not self.inbox or not isinstance(self.inbox[0], c.StartGroup | c.Resume):
            return False
        self.inbox.popleft()
        return True

    def fail_load(self) -> bool:
        """Fail the next command, if it is a load; loads under running requests do not fail."""
        load = self.inbox[0] if self.inbox else None
        if not isinstance(load, c.LoadVersion) or load.in_flight:
            return False
        self.inbox.popleft()
        self.slots[load.slot.number] = None
        reason = f"disk of {self.spec.instance}"
        self._context.report(e.SlotLoadFailed(slot=load.slot, version=load.version, reason=reason))
        return True

    def interrupt_move(self, move: c.Move, how: str) -> None:
        """Move only the first requests; the others are `kept` at the source, `lost`, or lost without a report."""
        moved = self._context.choose(len(move.trajectories))
        first, rest = slice(None, moved), slice(moved, None)
        self._export(
            msgspec.structs.replace(move, trajectories=move.trajectories[first], attempts=move.attempts[first])
        )
        left = [
            (trajectory, attempt)
            for trajectory, attempt in zip(move.trajectories[rest], move.attempts[rest], strict=True)
            if self._holds(trajectory, attempt)
        ]
        if how != "kept":
            for trajectory, _ in left:
                del self.requests[trajectory]
        if how != "silent" and left:
            self._context.report(
                e.MoveFailed(
                    trajectories=tuple(trajectory for trajectory, _ in left),
                    attempts=tuple(attempt for _, attempt in left),
                    source=move.source,
                    target=move.target,
                    kept=how == "kept",
                )
            )

    def generate(self) -> None:
        """Let one request sample a token, and perhaps park or end."""
        context = self._context
        trajectory = list(self.requests)[context.choose(len(self.requests))]
        request = self.requests[trajectory]
        if request.parked:
            request.parked = False
            context.report(e.Unparked(trajectory=trajectory, attempt=request.attempt, kv_tokens=self.kv_tokens))
            return
        version = self.slots[request.slot]
        require(version is not None, f"trajectory {trajectory} decodes on a slot without weights")
        assert version is not None
        request.served.append(version)
        what = context.choose(8)
        if what == 0 and context.tools:
            request.parked = True
            context.report(e.Parked(trajectory=trajectory, attempt=request.attempt, kv_tokens=self.kv_tokens))
        elif what < 4:
            self._end(trajectory, request, version)

    def _end(self, trajectory: TrajectoryId, request: FakeRequest, version: Version) -> None:
        context = self._context
        single = set(request.served) == {context.admitted_version(trajectory // context.config.group_size)}
        require(
            single or context.config.mode_spec.mixes_versions,
            f"C1: trajectory {trajectory} was served {request.served}",
        )
        del self.requests[trajectory]
        context.report(
            e.Generated(
                trajectory=trajectory,
                attempt=request.attempt,
                instance=self.spec.instance,
                version=version,
                fingerprint=fingerprint(version),
                tokens=1 + context.choose(context.config.max_response_tokens),
                kv_tokens=self.kv_tokens,
            )
        )

    def _on(self, slot: SlotId) -> list[TrajectoryId]:
        return [trajectory for trajectory, request in self.requests.items() if request.slot == slot.number]

    def _holds(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        request = self.requests.get(trajectory)
        return request is not None and request.attempt == attempt

    def _load(self, load: c.LoadVersion) -> None:
        on_slot = self._on(load.slot)
        require(load.in_flight or not on_slot, f"C1: {load.slot} is loaded under requests {on_slot}")
        self.slots[load.slot.number] = load.version
        self._context.report(e.SlotLoaded(slot=load.slot, version=load.version, fingerprint=fingerprint(load.version)))

    def _begin(self, trajectory: TrajectoryId, attempt: Attempt, slot: SlotId, version: Version) -> None:
        serves = self.slots[slot.number]
        mixes = self._context.config.mode_spec.mixes_versions
        require(serves is not None and (mixes or serves == version), f"C1: {slot} serves {serves}, not {version}")
        require(trajectory not in self.requests, f"trajectory {trajectory} runs twice on {slot}")
        self.requests[trajectory] = FakeRequest(attempt=attempt, slot=slot.number)
        # With tools there may be more for a while, because parked requests that come back wait in the engine.
        full = len(self.requests) > self.spec.max_requests and not self._context.tools
        require(not full, f"{slot} has more requests than it can take")

    def _export(self, move: c.Move) -> None:
        leaving = {
            trajectory: self.requests[trajectory]
            for trajectory, attempt in zip(move.trajectories, move.attempts, strict=True)
            if self._holds(trajectory, attempt)
        }
        if not leaving:
            return
        for trajectory in leaving:
            del self.requests[trajectory]
        self._context.send(move.target.instance, FakeBundle(move=move, requests=leaving))

    def _import(self, bundle: FakeBundle) -> None:
        """Accept a bundle if the slot still serves its version."""
        move = bundle.move
        trajectories = tuple(bundle.requests)
        attempts = tuple(request.attempt for request in bundle.requests.values())
        if self.slots[move.target.number] != move.version:
            self._context.report(
                e.MoveFailed(
                    trajectories=trajectories, attempts=attempts, source=move.source, target=move.target, kept=False
                )
            )
            return
        for trajectory, request in bundle.requests.items():
            request.slot = move.target.number
            self.requests[trajectory] = request
        self._context.report(
            e.Moved(trajectories=trajectories, attempts=attempts, source=move.source, target=move.target)
        )
