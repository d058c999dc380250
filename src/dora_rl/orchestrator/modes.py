"""How rollout and training interleave. A mode is a row of `MODES`: facts that the other modules read, and a policy.

- `sync`: step n trains groups of version n; rollout waits for training and training for the last trajectory.
- `one_step_off`: the next batch is generated while the last one trains, one version behind.
- `partial`: rollout never waits; new weights are loaded under running requests, so trajectories mix versions.
- `dora`: rollout never waits and trajectories never mix versions: several versions are served side by side.

To add a mode, add a row. No other module knows the modes by name: each asks the row (`ControlConfig.mode_spec`).

The admission policy of a mode decides which version new groups get and how many may be admitted. Its queries change
nothing; `open_batch` and `change_bound` are the only methods that change its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from dora_rl.core.types import Version
from dora_rl.orchestrator.adaptive_bound import FLOOR
from dora_rl.orchestrator.group_table import GroupTable

LayoutKind = Literal["colocated", "disaggregated", "elastic"]
MaxStaleness = int | Literal["auto"]
"""A staleness bound K, or `auto`: it is chosen while the run goes on (`adaptive_bound`)."""


class AdmissionPolicy(Protocol):
    """Which version new groups get, and how many may be admitted."""

    @property
    def staleness(self) -> int:
        """The bound K in force."""
        ...

    def open_batch(self, newest: Version, groups: GroupTable) -> None:
        """Begin another batch, if the policy admits whole batches and the next one may begin now."""
        ...

    def change_bound(self, staleness: int) -> None:
        """Admit by another bound from now on."""
        ...

    def version(self, newest: Version) -> Version:
        """The version that new groups get."""
        ...

    def allowance(self, groups: GroupTable) -> int:
        """How many more groups may be admitted now."""
        ...


@dataclass(slots=True)
class Streaming:
    """Admission is open while the untrained groups number less than (K + 1) * B; new groups get the newest version.

    K may change at any moment (`change_bound`). A group keeps the deadline that it got at its admission, its version +
    the K of that moment; groups admitted later get their version + the new K. A larger K opens admission at once. A
    smaller one closes it until the untrained groups number less than (new K + 1) * B, so it takes effect by waiting,
    and nothing is dropped.

    Why no deadline is missed, whatever the Ks were. Let n be the newest version, K the bound of now, and d >= n.
    Call due(d) the untrained groups with deadline <= d, later(d) the rest of the untrained, taken(d) those of the rest
    that step n has taken already. What must hold, between any two events, is the condition of `step_rule`:

        taken(d) <= B - need(d),      need(d) = due(d) - (d - n) * B

    - Changing K changes no group and no deadline, hence nothing in it.
    - Admitting a group with deadline n + K concerns only d >= n + K. All untrained groups, the new one included, number
      at most (K + 1) * B, so due(d) <= (K + 1) * B - later(d) <= (d - n + 1) * B - taken(d), which is the condition.
      Deadlines of groups admitted under other bounds do not enter: each is counted in due(d) or in later(d).
    - Taking and training keep it by the step rule, which knows deadlines only.
    - A group that leaves untrained (it failed, or ended without signal) was not taken, so no taken(d) changes and no
      due(d) grows. Its replacement is an admission like any other.
    And it moves: with fewer than B untrained groups admission is open under any K >= 0.
    """

    groups_per_step: int
    staleness: int

    def open_batch(self, newest: Version, groups: GroupTable) -> None:
        """Groups are admitted one by one, not in batches."""

    def change_bound(self, staleness: int) -> None:
        self.staleness = staleness

    def version(self, newest: Version) -> Version:
        return newest

    def allowance(self, groups: GroupTable) -> int:
        return (self.staleness + 1) * self.groups_per_step - groups.live


@dataclass(slots=True)
class Barrier:
    """Groups are admitted in whole batches; a batch opens when all groups of the one before have finished.

    Batch k is generated under one version, which is at least k - `staleness`.
    """

    groups_per_step: int
    staleness: int
    opened: int = 0
    """Number of batches opened so far."""
    pinned: Version = 0
    """Version of the batch opened last."""

    def open_batch(self, newest: Version, groups: GroupTable) -> None:
        if newest >= self.opened - self.staleness and not self.allowance(groups) and not groups.unfinished:
            self.opened += 1
            self.pinned = newest

    def change_bound(self, staleness: int) -> None:
        raise AssertionError(f"a barrier has the bound {self.staleness}, not {staleness}")

    def version(self, newest: Version) -> Version:  # noqa: ARG002
        return self.pinned

    def allowance(self, groups: GroupTable) -> int:
        """Groups that the opened batches still lack; one that failed or had no signal is replaced in its batch."""
        return self.opened * self.groups_per_step - groups.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeSpec:
    """One mode: what the other modules need to know about it."""

    policy: Callable[[int, int], AdmissionPolicy]
    """Makes the admission policy, from `groups_per_step` and the staleness bound."""
    bound: int | None = None
    """The staleness bound, if the mode fixes it; None if `control.max_staleness` sets it."""
    bound_can_change: bool = False
    """The bound may change while the run goes on."""
    mixes_versions: bool = False
    """New weights are loaded under running requests, which go on with them."""
    serves_several_versions: bool = False
    """Old versions keep slots while they have requests; slots are divided between versions and requests move."""
    streams: bool = False
    """Finished groups may go to the trainer before their step is complete."""
    overlaps: bool = True
    """Rollout goes on while the trainer works."""
    admits_newest_only: bool = False
    """A new group always gets the newest version."""
    layout: LayoutKind = "disaggregated"
    """Default layout of devices in simulations."""

    def staleness(self, max_staleness: MaxStaleness) -> int:
        """The bound in force at the start of a run with this setting of `control.max_staleness`."""
        if self.bound is not None:
            return self.bound
        return FLOOR if max_staleness == "auto" else max_staleness


MODES: dict[str, ModeSpec] = {
    "sync": ModeSpec(policy=Barrier, bound=0, overlaps=False, admits_newest_only=True, layout="colocated"),
    "one_step_off": ModeSpec(policy=Barrier, bound=1),
    "partial": ModeSpec(
        policy=Streaming, mixes_versions=True, streams=True, admits_newest_only=True, layout="colocated"
    ),
    "dora": ModeSpec(
        policy=Streaming,
        bound_can_change=True,
        serves_several_versions=True,
        streams=True,
        admits_newest_only=True,
    ),
}
