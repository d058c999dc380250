"""A lower bound on the time of a step under any schedule; simulated schedules are compared with it.

A step can't be shorter than any of

- the trainer's time: its FLOPs on its devices, and its fixed part;
- the time to generate a step's tokens at the peak rate of all instances; devices that train can't generate meanwhile;
- the time of the longest trajectory as the only request of an instance, divided by K + 1, the number of steps that may
  overlap it.

With K = 0 nothing overlaps, and the times of rollout and training add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dora_rl.orchestrator.modes import LayoutKind
from dora_rl.sim.config import SimConfig
from dora_rl.sim.costs import Costs
from dora_rl.sim.workload import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """The bound in seconds, by resource."""

    trainer: float
    tokens: float
    longest: float
    serial: bool
    """K is 0: rollout and training can't overlap."""

    @property
    def seconds(self) -> float:
        if self.serial:
            return self.trainer + max(self.tokens, self.longest)
        return max(self.trainer, self.tokens, self.longest)

    @property
    def binds(self) -> str:
        """The resource that determines the bound."""
        return max(("trainer", "tokens", "longest"), key=lambda name: float(getattr(self, name)))


def lower_bound(config: SimConfig, layout: LayoutKind, *, staleness: int, tokens: float, longest: float) -> LowerBound:
    """The bound for steps of `tokens` response tokens whose longest response has `longest` tokens."""
    costs = Costs(config)
    control = config.control
    trainer_devices, sharing, dedicated = config.divide(layout)
    prompts = config.workload.prompt_tokens
    trained = tokens + prompts * control.groups_per_step * control.group_size
    trainer = costs.train(int(trained), trainer_devices) + config.trainer.fixed_seconds + config.trainer.publish_seconds
    rate = costs.peak_rate(prompts + mean_context(config))
    serial = staleness == 0
    # Shared devices can't generate while they train. With K = 0 that time is added in any case.
    lost = 0.0 if serial else sharing * rate * trainer
    return LowerBound(
        trainer=trainer,
        tokens=(tokens + lost) / (rate * (sharing + dedicated)),
        longest=costs.single_request(int(longest), prompts) / (staleness + 1),
        serial=serial,
    )


def mean_context(config: SimConfig) -> float:
    """Response tokens in the context of a running request, averaged over time: E[L^2] / (2 E[L])."""
    control = config.control
    source = Source(config.workload, control.group_size, control.max_response_tokens, config.seed)
    lengths = source.sample(min(512, 4 * control.groups_per_step)).astype(np.float64)
    return float((lengths**2).mean() / (2 * lengths.mean()))
