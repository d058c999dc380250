"""How many slots each version should have. A rule is a pure function from facts to counts; `rebalance` decides which
slots those are, and `migration` which requests move.

- `deadline` (ours): an old version keeps the fewest slots that hold its requests and let its longest one meet the
  version's deadline; all other slots serve the newest version. While admission is closed, spare slots speed up the
  version that blocks.
- `proportional` (the paper's rule): slots in proportion to requests, at least one for a version that has any.

To add a placement rule, write its function and add a row to `PLACEMENT_RULES`. No other module knows the rules by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.core.types import DecodeCost, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Facts about one version that has requests."""

    version: Version
    requests: int
    kv_tokens: int
    slots: int
    longest: int
    """Predicted tokens still to come for its longest request."""
    seconds_left: float
    """Until the step of its deadline needs its groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFacts:
    """Facts about all versions and slots."""

    newest: Version
    old: tuple[VersionFacts, ...]
    """Versions before the newest that have requests, oldest first."""
    newest_requests: int
    """Requests of the newest version: those that run, and those that admission would begin now."""
    admissible: int
    """Requests that admission would begin now."""
    slots: int
    """Number of slots on instances that are not paused."""
    max_requests: int
    """Requests that a typical instance takes."""
    kv_tokens: int
    """Tokens of KV cache that may be filled on a typical instance."""
    decode: DecodeCost
    overhead_seconds: float
    """How long it takes to load another version into a slot, as measured so far."""


_NEAR_BEST = 1.03
"""Slots beyond this close to the best drain time are better used for new groups."""

_MARGIN = 0.7
"""Share of the time left that a drain may be predicted to take, since lengths are guessed and ranks unevenly loaded. A
slot too many costs little; a missed deadline stalls the trainer."""

Targets = dict[Version, int]


def fewest(facts: PlacementFacts, old: VersionFacts) -> int:
    """Slots that just hold the requests of a version."""
    return max(1, math.ceil(old.requests / facts.max_requests), math.ceil(old.kv_tokens / facts.kv_tokens))


def drain_seconds(facts: PlacementFacts, old: VersionFacts, slots: int) -> float:
    """How long the longest request of a version takes if its requests are spread over this many slots."""
    return old.longest * facts.decode.seconds(old.requests / slots, old.kv_tokens / slots)


def deadline(facts: PlacementFacts) -> Targets:
    """The fewest slots that hold a version and meet its deadline; spare ones go where they help most."""
    targets: Targets = {}
    # One slot stays with the newest version if anything could be admitted there.
    room = facts.slots - (1 if facts.newest_requests else 0)
    for old in facts.old:
        others = sum(1 for other in facts.old if other.version > old.version)
        most = max(1, room - others)
        targets[old.version] = _in_time(facts, old, most)
        room -= targets[old.version]
    if not facts.admissible:
        _spread(facts, targets)
    return targets


def _in_time(facts: PlacementFacts, old: VersionFacts, most: int) -> int:
    """The fewest slots with which a version meets its deadline, or comes near the best that any number can do."""
    wanted = min(fewest(facts, old), most)
    most = min(most, old.requests)
    in_time = _MARGIN * old.seconds_left
    if wanted >= most or drain_seconds(facts, old, wanted) <= in_time:
        return wanted
    aim = max(in_time, _NEAR_BEST * drain_seconds(facts, old, most))
    while wanted < most and drain_seconds(facts, old, wanted) > aim:
        wanted += 1
    return wanted


def _spread(facts: PlacementFacts, targets: Targets) -> None:
    """Admission is closed: give slots that would idle to the oldest version, while that shortens its drain well."""
    if not facts.old:
        return
    needed = math.ceil(facts.newest_requests / facts.max_requests)
    spare = facts.slots - sum(targets.values()) - needed
    oldest = facts.old[0]
    have = targets[oldest.version]
    while spare > 0 and have < oldest.requests:
        more = min(have, spare, oldest.requests - have)  # double, as far as there are slots
        now = drain_seconds(facts, oldest, have)
        gain = now - drain_seconds(facts, oldest, have + more)
        if gain <= max(4 * facts.overhead_seconds, 0.1 * now):
            break
        have += more
        spare -= more
    targets[oldest.version] = have


def proportional(facts: PlacementFacts) -> Targets:
    """Shares by requests, largest remainders first, at least one for each version that has any."""
    loads = {old.version: old.requests for old in facts.old}
    if facts.newest_requests:
        loads[facts.newest] = facts.newest_requests
    total = sum(loads.values())
    if not total:
        return {}
    exact = {version: facts.slots * load / total for version, load in loads.items()}
    targets = {version: max(1, int(share)) for version, share in exact.items()}
    by_remainder = sorted(exact, key=lambda version: (int(exact[version]) - exact[version], version))
    left = facts.slots - sum(targets.values())
    for version in by_remainder[: max(0, left)]:
        targets[version] += 1
    while sum(targets.values()) > facts.slots and max(targets.values()) > 1:
        largest = max(targets, key=lambda version: (targets[version], version))
        targets[largest] -= 1
    targets.pop(facts.newest, None)
    return targets


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRule:
    """One placement rule."""

    targets: Callable[[PlacementFacts], Targets]
    """How many slots each old version should have."""
    consolidates: bool
    """Between rebalances too, a version gives up slots as soon as its remaining requests fit on fewer."""


PLACEMENT_RULES: dict[str, PlacementRule] = {
    "deadline": PlacementRule(targets=deadline, consolidates=True),
    "proportional": PlacementRule(targets=proportional, consolidates=False),
}
