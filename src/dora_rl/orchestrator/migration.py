"""Which requests move where. The functions are pure: they read slots and return plain moves.

Requests move for one of these reasons: to empty a slot of a draining version into the other slots of that version, so
that the slot can serve another version; to spread a version's requests onto a slot that was just given to it; to take
load off a full KV cache; to leave an instance that pauses. Requests that need not move for that purpose stay where they
are.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dora_rl.orchestrator.group_table import Stage, TrajectoryState
from dora_rl.orchestrator.instances import SlotState

MAX_RECEIVERS = 16
"""How many slots may share the requests of an emptied one: enough to balance, few enough to plan fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """Requests that leave one slot for another together."""

    source: SlotState
    target: SlotState
    trajectories: tuple[TrajectoryState, ...]


def movable(slot: SlotState) -> bool:
    """All requests of the slot could leave it now."""
    return (
        slot.loading is None
        and not slot.incoming
        and all(trajectory.stage is Stage.RUNNING for trajectory in slot.requests.values())
    )


def evacuate(source: SlotState, targets: Iterable[SlotState], share: float) -> list[PlannedMove] | None:
    """Moves that empty `source` into `targets`, filling their KV to at most `share`; None if they do not fit.

    The largest requests are placed first, each on the emptiest target, so that the receivers stay balanced.
    """
    wanted = sorted(source.requests.values(), key=lambda trajectory: -trajectory.context)
    moves = _distribute(source, wanted, targets, share)
    return moves if sum(len(move.trajectories) for move in moves) == len(wanted) else None


def lighten(source: SlotState, targets: Iterable[SlotState], tokens: int, share: float) -> list[PlannedMove]:
    """Moves that take about this many tokens of KV off `source`, in as few requests as possible."""
    wanted: list[TrajectoryState] = []
    for trajectory in sorted(source.requests.values(), key=lambda trajectory: -trajectory.context):
        if tokens <= 0:
            break
        if trajectory.stage is Stage.RUNNING:
            wanted.append(trajectory)
            tokens -= trajectory.context
    return _distribute(source, wanted, targets, share)


def _distribute(
    source: SlotState, wanted: Sequence[TrajectoryState], targets: Iterable[SlotState], share: float
) -> list[PlannedMove]:
    """Place the wanted requests one by one, each on the emptiest target, until one does not fit."""
    heap: list[tuple[float, int, SlotState]] = []
    planned: dict[int, tuple[int, int]] = {}  # requests and tokens that each target has been given so far
    candidates = [slot for slot in targets if slot.instance is not source.instance and slot.open]
    for number, slot in enumerate(candidates):
        heap.append((slot.instance.load, number, slot))
        planned[number] = (0, 0)
    heapq.heapify(heap)
    given: dict[int, list[TrajectoryState]] = {}
    for trajectory in wanted:
        counted = 0 if trajectory.parked else 1
        while heap:
            _, number, slot = heap[0]
            requests, tokens = planned[number]
            if slot.instance.has_room(requests + counted, tokens + trajectory.context, share):
                break
            heapq.heappop(heap)
        if not heap:
            break
        _, number, slot = heap[0]
        requests, tokens = planned[number]
        planned[number] = (requests + counted, tokens + trajectory.context)
        given.setdefault(number, []).append(trajectory)
        spec = slot.instance.spec
        load = max(
            (slot.instance.active + requests + counted) / spec.max_requests,
            (slot.instance.kv_tokens + tokens + trajectory.context) / spec.kv_tokens,
        )
        heapq.heapreplace(heap, (load, number, slot))
    return [
        PlannedMove(source=source, target=candidates[number], trajectories=tuple(trajectories))
        for number, trajectories in given.items()
    ]


def spread(target: SlotState, donors: deque[SlotState], even: int, share: float) -> list[PlannedMove]:
    """Moves that bring `target` an even part of its version's requests, the longest-running ones first.

    Donors that have no more than their even part leave the queue, so that a sequence of calls looks at each once.
    """
    moves: list[PlannedMove] = []
    requests = tokens = 0
    while donors and requests < even:
        donor = donors[0]
        leaving: list[TrajectoryState] = []
        wanted = min(len(donor.requests) - even, even - requests)
        usable = donor.serving == target.version and not donor.instance.lost and donor.instance is not target.instance
        if usable and wanted > 0:
            for trajectory in sorted(donor.requests.values(), key=lambda it: (-it.tokens, it.id)):
                counted = 0 if trajectory.parked else 1
                fits = target.instance.has_room(requests + counted, tokens + trajectory.context, share)
                if trajectory.stage is not Stage.RUNNING or not fits:
                    continue
                leaving.append(trajectory)
                requests += 1
                tokens += trajectory.context
                if len(leaving) == wanted:
                    break
        if leaving:
            moves.append(PlannedMove(source=donor, target=target, trajectories=tuple(leaving)))
        if requests < even:
            donors.popleft()
    return moves
