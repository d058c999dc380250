"""The open step: what has been accumulated towards the next version.

Gradient sums are in the parameters' `.grad`; the denominator, the metric sums and the groups themselves are here. The
groups are kept until the step closes: several updates need them, and so does the search for the trajectories that
cause a non-finite gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dora_rl.core.errors import IntegrityError
from dora_rl.core.trajectory import Group
from dora_rl.core.types import GroupId, StepId, TrajectoryId
from dora_rl.trainer.algorithms import get_algorithm
from dora_rl.trainer.config import AlgorithmConfig

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


@dataclass(slots=True)
class OpenStep:
    """One step, from its first group to its last update."""

    step: StepId
    groups: list[Group] = field(default_factory=list)
    advantages: dict[TrajectoryId, float] = field(default_factory=dict)
    skipped: set[GroupId] = field(default_factory=set)
    no_signal: int = 0
    denominator: int = 0
    """Denominator of the gradient sums accumulated since the last update."""
    total_denominator: int = 0
    """Sum of the denominators of all updates of the step."""
    sums: dict[str, float] = field(default_factory=dict)
    update_weights: dict[str, float] = field(default_factory=dict)
    """Sums of importance weights since the last update (`effective_samples.weight_sums`), of this rank."""
    kept: dict[TrajectoryId, torch.Tensor] = field(default_factory=dict)
    """Which trained tokens of the current update the trust region `second_moment` keeps, by trajectory."""
    rates: list[float] = field(default_factory=list)
    """The learning rates of the updates made."""
    max_ratio: float = 0.0
    gap_counts: torch.Tensor | None = None
    """Numbers of tokens by the distance between engine and trainer log-probs (`logprob_gap.histogram`)."""
    gaps: dict[str, float] = field(default_factory=dict)
    """The gap of stale trajectories by its causes, if it was measured in this step."""
    expert_load: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0
    packed_tokens: int = 0
    trained_tokens: int = 0
    attended_pairs: int = 0
    """Number of (query, key) pairs in attention."""

    def add(self, groups: Sequence[Group]) -> None:
        """Add groups to this step. A group is added once, and its version exists when the step starts."""
        known = {group.id for group in self.groups}
        for group in groups:
            if group.id in known:
                raise IntegrityError(f"group {group.id} is already in step {self.step}")
            if group.version > self.step:
                raise IntegrityError(
                    f"group {group.id} is of version {group.version}, which does not exist before step {self.step}"
                )
            known.add(group.id)
        self.groups.extend(groups)

    def score(self, groups: list[Group], config: AlgorithmConfig) -> list[Group]:
        """Compute the advantages of groups and return the groups to train.

        A group whose advantages are all zero is counted in `no_signal`, and in `skipped` if it is left out.
        """
        rewards: list[NDArray[np.float64]] = [
            np.array([trajectory.reward for trajectory in group.trajectories]) for group in groups
        ]
        trained = []
        for group, advantages in zip(groups, get_algorithm(config.name).advantage(rewards), strict=True):
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
                self.advantages[trajectory.id] = float(advantage)
            if not advantages.any():
                self.no_signal += 1
                if config.no_signal == "skip":
                    self.skipped.add(group.id)
                    continue
            trained.append(group)
        return trained
