"""A simulated rollout instance: a fluid model of continuous batching.

All requests of an instance advance together, one token per decode step, so the instance has one step counter, and each
request stores the count at which its turn ends. Between two changes of the batch the time of n steps has a closed form,
since the context grows by one token per request and step:

    seconds(n) = n * a + n^2 * c     a: seconds of the current step,   c: half of its growth per step

On lock-step ranks the rank with the most context determines the time of a step; it is looked up whenever the batch
changes.

An instance is in exactly one state: paused (its devices train), stalled (prefill, re-prefill, swap, load under running
requests), or decoding. Times are nanoseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import SECOND, Attempt, InstanceSpec, Nanoseconds, TrajectoryId, Version, nanoseconds
from dora_rl.sim.costs import Costs
from dora_rl.sim.workload import SimTurn

_STARTING = IdleCause(reason=IdleReason.STARTING)
_SPARE = IdleCause(reason=IdleReason.SPARE)


@dataclass(slots=True, eq=False)
class SimRequest:
    """A trajectory that is being generated."""

    trajectory: TrajectoryId
    attempt: Attempt
    turns: list[SimTurn]
    context: float
    """Tokens of KV when the request last joined or left a batch."""
    remaining: float
    """Tokens to the end of the turn at that time."""
    turn: int = 0
    slot: int = 0
    rank: int = 0
    joined: float = 0.0
    """The instance's step count when the request joined the batch."""
    ticket: int = 0
    """Identifies one stay in the batch of `instance`; 0 means not in a batch."""
    instance: SimInstance | None = field(default=None, repr=False)
    parked: bool = False


@dataclass(slots=True, eq=False)
class SimSlot:
    """The state and the time account of one slot."""

    account: TimeAccount
    version: Version | None = None
    loading: bool = False
    active: int = 0
    transfers: int = 0
    cause: IdleCause = field(default=_STARTING)


class SimInstance:
    """One rollout engine on the virtual clock."""

    def __init__(self, spec: InstanceSpec, costs: Costs, now: Nanoseconds, *, keep_segments: bool) -> None:
        self.spec = spec
        self.paused = False
        self.requests: dict[TrajectoryId, SimRequest] = {}
        self.generation = 0
        """Grows whenever the next wake-up is rescheduled, so that an outdated one is recognised."""
        self.swaps = 0
        self.slot_list = [
            SimSlot(TimeAccount(now, Activity(ActivityLabel.IDLE, None, _STARTING), keep_segments=keep_segments))
            for _ in range(spec.slots)
        ]
        self._costs = costs
        self._steps = 0.0
        self._since = now
        self._active = 0
        self._offsets = [0.0] * costs.ranks
        self._counts = [0] * costs.ranks
        self._finishing: list[tuple[float, int, SimRequest]] = []
        self._ticket = 0
        self._swapped: deque[SimRequest] = deque()
        self._stalls: deque[tuple[ActivityLabel, Nanoseconds]] = deque()
        self._stall_end: Nanoseconds | None = None
        self._stall_label = ActivityLabel.PREFILL

    # -- load -------------------------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """KV tokens in device memory."""
        return int(sum(self._offsets) + self._active * self._steps)

    def tokens(self, now: Nanoseconds) -> dict[TrajectoryId, int]:
        """Response tokens of each request so far, decoded up to `now`."""
        self.advance(now)
        steps = self._steps
        result = {}
        for trajectory, request in self.requests.items():
            done = steps - request.joined if request.ticket else 0.0
            before = sum(turn.tokens for turn in request.turns[: request.turn])
            result[trajectory] = before + int(request.turns[request.turn].tokens - request.remaining + done)
        return result

    # -- time -------------------------------------------------------------------------------------------------

    def advance(self, now: Nanoseconds) -> None:
        """Decode up to `now`."""
        elapsed = (now - self._since) / SECOND
        self._since = now
        if elapsed <= 0 or self.paused or self._stall_end is not None or not self._active:
            return
        a, c = self._pace()
        self._steps += (math.sqrt(a * a + 4 * c * elapsed) - a) / (2 * c) if c else elapsed / a

    def next_wake(self) -> Nanoseconds | None:
        """When the state next changes without a command: a stall or a turn ends, or the KV cache is full."""
        if self.paused:
            return None
        if self._stall_end is not None:
            return self._stall_end
        while self._finishing and not self._is_current(self._finishing[0]):
            heapq.heappop(self._finishing)
        if not self._active:
            return None
        steps = max(0.0, self._finishing[0][0] - self._steps)
        free = self.spec.kv_tokens - self.kv_tokens
        if self._active > 1:
            steps = min(steps, max(0.0, free / self._active))
        a, c = self._pace()
        return self._since + math.ceil((steps * a + steps * steps * c) * SECOND)

    def wake(self, now: Nanoseconds) -> list[SimRequest]:
        """Update the state to `now`; return the requests that finished a turn and left the batch."""
        if self._stall_end is not None and now >= self._stall_end:
            self._since = now
            self._stall_end = None
            self._next_stall(now)
            return []
        self.advance(now)
        done: list[SimRequest] = []
        while self._finishing and self._finishing[0][0] <= self._steps + 1e-6:
            entry = heapq.heappop(self._finishing)
            if self._is_current(entry):
                request = entry[2]
                self.leave(request)
                request.remaining = 0.0
                done.append(request)
        if not done and self._active > 1 and self.kv_tokens + self._active >= self.spec.kv_tokens:
            self._swap_out(now)
        return done

    def _is_current(self, entry: tuple[float, int, SimRequest]) -> bool:
        """Whether the request of the entry has been in the batch ever since the entry was made."""
        _, ticket, request = entry
        return request.ticket == ticket and request.instance is self

    def _pace(self) -> tuple[float, float]:
        """Seconds of the current step, and half of its growth per step."""
        costs = self._costs
        versions = 1 if len(self.slot_list) == 1 else sum(1 for slot in self.slot_list if slot.active)
        base = costs.step_base(self._active, versions)
        steps = self._steps
        if len(self._counts) == 1:
            return base + costs.per_token * (
                self._offsets[0] + self._active * steps
            ), costs.per_token * self._active / 2
        context, count = max(
            (offset + count * steps, count) for offset, count in zip(self._offsets, self._counts, strict=True)
        )
        return base + costs.per_token * context, costs.per_token * count / 2

    # -- requests ---------------------------------------------------------------------------------------------

    def join(self, request: SimRequest) -> None:
        """Add the request to the batch. Call `advance` before."""
        self._ticket += 1
        request.ticket = self._ticket
        request.instance = self
        request.joined = self._steps
        if len(self._counts) > 1:
            request.rank = self._emptiest_rank()
        self._offsets[request.rank] += request.context - self._steps
        self._counts[request.rank] += 1
        self._active += 1
        self.slot_list[request.slot].active += 1
        heapq.heappush(self._finishing, (self._steps + request.remaining, request.ticket, request))

    def _emptiest_rank(self) -> int:
        """The rank with the least context."""
        steps = self._steps
        loads = [offset + count * steps for offset, count in zip(self._offsets, self._counts, strict=True)]
        return loads.index(min(loads))

    def leave(self, request: SimRequest) -> None:
        """Remove the request from the batch and update its context and remaining tokens."""
        if not request.ticket:
            return
        decoded = self._steps - request.joined
        self._offsets[request.rank] -= request.context - request.joined
        self._counts[request.rank] -= 1
        self._active -= 1
        self.slot_list[request.slot].active -= 1
        request.ticket = 0
        request.context += decoded
        request.remaining = max(0.0, request.remaining - decoded)

    def remove(self, request: SimRequest) -> None:
        """Remove the request from the instance."""
        self.leave(request)
        del self.requests[request.trajectory]
        if request in self._swapped:
            self._swapped.remove(request)

    def _swap_out(self, now: Nanoseconds) -> None:
        """The KV cache is full: swap the requests that joined last to host memory, until a twentieth of it is free."""
        target = self.spec.kv_tokens * 0.95
        tokens = 0.0
        running = sorted((request for request in self.requests.values() if request.ticket), key=lambda r: r.ticket)
        while len(running) > 1 and self.kv_tokens > target:
            request = running.pop()
            self.leave(request)
            self._swapped.append(request)
            tokens += request.context
            self.swaps += 1
        self.stall(now, ActivityLabel.MIGRATE, self._costs.swap(int(tokens)))

    def swap_in(self, now: Nanoseconds) -> None:
        """Swap in the requests that fit, in the order in which they were swapped out."""
        while self._swapped:
            request = self._swapped[0]
            if self.kv_tokens + request.context > self.spec.kv_tokens * 0.95 and self._active:
                return
            self._swapped.popleft()
            self.join(request)
            self.stall(now, ActivityLabel.MIGRATE, self._costs.swap(int(request.context)))

    # -- stalls and pauses ------------------------------------------------------------------------------------

    def stall(self, now: Nanoseconds, label: ActivityLabel, seconds: float) -> None:
        """Stop decoding for this long. Call `advance` before."""
        duration = nanoseconds(seconds)
        if duration <= 0:
            return
        if self._stalls and self._stalls[-1][0] is label:
            self._stalls[-1] = (label, self._stalls[-1][1] + duration)
        elif not self._stalls and self._stall_end is not None and self._stall_label is label:
            self._stall_end += duration
        else:
            self._stalls.append((label, duration))
        if self._stall_end is None and not self.paused:
            self._next_stall(now)

    def _next_stall(self, now: Nanoseconds) -> None:
        if self._stalls:
            self._stall_label, duration = self._stalls.popleft()
            self._stall_end = now + duration

    def pause(self, now: Nanoseconds) -> None:
        """Stop generating because the devices train."""
        self.advance(now)
        self.paused = True
        if self._stall_end is not None:
            self._stalls.appendleft((self._stall_label, self._stall_end - now))
            self._stall_end = None

    def resume(self, now: Nanoseconds) -> None:
        """Generate again, after weights and KV have come back from host memory."""
        self._since = now
        self.paused = False
        if self.requests:
            self._stalls.appendleft((ActivityLabel.LOAD, nanoseconds(self._costs.switch_role(self.kv_tokens))))
        self._next_stall(now)

    # -- labels -----------------------------------------------------------------------------------------------

    def relabel(self, now: Nanoseconds) -> None:
        """Account for the time of each slot under its current activity."""
        for slot in self.slot_list:
            slot.account.switch(now, self._activity(slot))

    def _activity(self, slot: SimSlot) -> Activity:
        if self.paused:
            return Activity(ActivityLabel.TRAIN, slot.version)
        if slot.loading:
            return Activity(ActivityLabel.LOAD, slot.version)
        if slot.active:
            return Activity(ActivityLabel.DECODE if self._stall_end is None else self._stall_label, slot.version)
        if slot.transfers:
            return Activity(ActivityLabel.MIGRATE, slot.version)
        return Activity(ActivityLabel.IDLE, slot.version, _SPARE if self._active else slot.cause)
