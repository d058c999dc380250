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

from dora_rl.control.config import ControlConfig, ModeName
from dora_rl.control.ledger import Ledger
from dora_rl.core.nouns import Version


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

    def version(self, newest: Version, ledger: Ledger) -> Version:
        """The version that new groups get."""
        ...

    def allowance(self, newest: Version, ledger: Ledger) -> int:
        """How many more groups may be admitted now."""
        ...


@dataclass(slots=True)
class Streaming:
    """`dora` and `partial`: admission is open while the untrained groups number less than (K + 1) * B."""

    groups_per_step: int
    staleness: int
    mixes_versions: bool

    @property
    def repartitions(self) -> bool:
        return not self.mixes_versions

    @property
    def streams(self) -> bool:
        return self.staleness > 0  # K = 0 is synchronous training, also in the order of its sums

    def version(self, newest: Version, ledger: Ledger) -> Version:  # noqa: ARG002
        return newest

    def allowance(self, newest: Version, ledger: Ledger) -> int:  # noqa: ARG002
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

    def version(self, newest: Version, ledger: Ledger) -> Version:
        self._open(newest, ledger)
        return self.pinned

    def allowance(self, newest: Version, ledger: Ledger) -> int:
        self._open(newest, ledger)
        return self._missing(ledger)

    def _missing(self, ledger: Ledger) -> int:
        """Groups that the opened batches still lack; a failed group is replaced in its batch."""
        return self.opened * self.groups_per_step - (ledger.admitted - ledger.failed)

    def _open(self, newest: Version, ledger: Ledger) -> None:
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
