"""How rollout and training interleave: a mode says which version new groups get, and how many may be admitted now.

- `sync`: step n trains groups of version n; rollout waits for training and training for the last trajectory.
- `one_step_off`: the next batch is generated while the last one trains, one version behind.
- `partial`: rollout never waits; new weights are loaded under running requests, so trajectories mix versions.
- `dora`: rollout never waits and trajectories never mix: several versions are served side by side.

A mode is a policy of the one orchestrator, not a second loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dora_rl.core.types import Version
from dora_rl.orchestrator.config import ControlConfig, ModeName
from dora_rl.orchestrator.group_table import GroupTable


class Mode(Protocol):
    """The policy by which the modes differ."""

    @property
    def staleness(self) -> int:
        """The bound K in force."""
        ...

    @property
    def mixes_versions(self) -> bool:
        """Running requests go on under new weights."""
        ...

    @property
    def repartitions(self) -> bool:
        """Old versions keep slots of their own, and requests move between them."""
        ...

    @property
    def streams(self) -> bool:
        """Finished groups may go to the trainer before their step is complete."""
        ...

    @property
    def rebounds(self) -> bool:
        """The bound may be changed while it runs."""
        ...

    def rebound(self, staleness: int) -> None:
        """Admit by another bound from now on."""
        ...

    def version(self, newest: Version, ledger: GroupTable) -> Version:
        """The version that new groups get."""
        ...

    def allowance(self, newest: Version, ledger: GroupTable) -> int:
        """How many more groups may be admitted now."""
        ...


@dataclass(slots=True)
class Streaming:
    """`dora` and `partial`: admission is open while the untrained groups number less than (K + 1) * B.

    K may change at any moment (`rebound`). A group keeps the deadline that it got, its version + the K of then; the
    groups admitted later get version + the new K. A larger K opens admission at once. A smaller one closes it until the
    untrained groups number less than (new K + 1) * B, so it takes effect by waiting, and nothing is dropped.

    Why no deadline is missed, whatever the Ks were. Let n be the newest version, K the bound of now, and d >= n.
    Call due(d) the untrained groups with deadline <= d, later(d) the rest of the untrained, taken(d) those of the rest
    that step n has taken already. What must hold, between any two events, is the condition of `batching`:

        taken(d) <= B - need(d),      need(d) = due(d) - (d - n) * B

    - Changing K changes no group and no deadline, hence nothing in it.
    - Admitting a group with deadline n + K concerns only d >= n + K. All untrained groups, the new one included, number
      at most (K + 1) * B, so due(d) <= (K + 1) * B - later(d) <= (d - n + 1) * B - taken(d), which is the condition.
      Deadlines of groups admitted under other bounds do not enter: each is counted in due(d) or in later(d).
    - Taking and training keep it by the step rule, which knows deadlines only.
    And it moves: with fewer than B untrained groups admission is open under any K >= 0.
    """

    groups_per_step: int
    staleness: int
    mixes_versions: bool

    @property
    def repartitions(self) -> bool:
        return not self.mixes_versions

    @property
    def streams(self) -> bool:
        return self.staleness > 0  # K = 0 is synchronous training, also in the order of its sums

    @property
    def rebounds(self) -> bool:
        return not self.mixes_versions

    def rebound(self, staleness: int) -> None:
        self.staleness = staleness

    def version(self, newest: Version, ledger: GroupTable) -> Version:  # noqa: ARG002
        return newest

    def allowance(self, newest: Version, ledger: GroupTable) -> int:  # noqa: ARG002
        return (self.staleness + 1) * self.groups_per_step - ledger.live


@dataclass(slots=True)
class Barrier:
    """`sync` (lag 0) and `one_step_off` (lag 1): whole batches, each opened when the one before has finished.

    Batch k is generated under one version, at least k - lag.
    """

    groups_per_step: int
    lag: int
    opened: int = 0
    pinned: Version = 0

    @property
    def staleness(self) -> int:
        return self.lag

    @property
    def mixes_versions(self) -> bool:
        return False

    @property
    def repartitions(self) -> bool:
        return False

    @property
    def streams(self) -> bool:
        return False

    @property
    def rebounds(self) -> bool:
        return False

    def rebound(self, staleness: int) -> None:
        raise AssertionError(f"a barrier has the bound {self.lag}, not {staleness}")

    def version(self, newest: Version, ledger: GroupTable) -> Version:
        self._open(newest, ledger)
        return self.pinned

    def allowance(self, newest: Version, ledger: GroupTable) -> int:
        self._open(newest, ledger)
        return self._missing(ledger)

    def _missing(self, ledger: GroupTable) -> int:
        """Groups that the opened batches still lack; a failed group is replaced in its batch."""
        return self.opened * self.groups_per_step - (ledger.admitted - ledger.failed)

    def _open(self, newest: Version, ledger: GroupTable) -> None:
        if newest >= self.opened - self.lag and not self._missing(ledger) and not ledger.unfinished:
            self.opened += 1
            self.pinned = newest


def make_mode(config: ControlConfig) -> Mode:
    """The mode that a config names."""
    batch, staleness = config.groups_per_step, config.max_staleness
    modes: dict[ModeName, Mode] = {
        "sync": Barrier(groups_per_step=batch, lag=0),
        "one_step_off": Barrier(groups_per_step=batch, lag=1),
        "partial": Streaming(groups_per_step=batch, staleness=staleness, mixes_versions=True),
        "dora": Streaming(groups_per_step=batch, staleness=staleness, mixes_versions=False),
    }
    return modes[config.mode]
