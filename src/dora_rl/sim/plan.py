"""Branch-and-bound search for the best K, instance size, slots per instance and split between training and rollout.

Every candidate has a lower bound that is cheap to compute. Candidates are simulated in the order of their bounds until
no remaining bound is below the best time found, so the candidates that are left out can't win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from dora_rl.core.errors import ConfigError
from dora_rl.sim.config import SimConfig
from dora_rl.sim.lower_bound import LowerBound, lower_bound
from dora_rl.sim.run import Result, Variant, parse_variant, simulate
from dora_rl.sim.workload import Source

STALENESS = (1, 2, 3, 4, 6, 8)
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the devices for the trainer."""
SLOTS = (1, 2)
"""Slots per instance. A second set of weights saves moves and loads but takes KV cache memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to use the cluster."""

    config: SimConfig
    variant: Variant
    bound: LowerBound

    @property
    def staleness(self) -> int:
        return self.config.control.staleness

    @property
    def trainer_devices(self) -> int:
        return self.config.divide("disaggregated")[0]

    @property
    def slots(self) -> int:
        return self.config.rollout.slots

    @property
    def instances(self) -> int:
        return self.config.divide("disaggregated")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A candidate with its simulated result."""

    candidate: Candidate
    result: Result

    @property
    def step_seconds(self) -> float:
        return self.result.step_seconds

    @property
    def mean_staleness(self) -> float:
        return self.result.mean_staleness

    @property
    def binds(self) -> str:
        """The resource that limits the throughput."""
        waiting = self.result.rollout_only
        if waiting < 0.05:
            return "trainer"
        if self.result.trainer.get("idle: deadline", 0.0) > waiting / 2:
            return f"longest trajectories (K = {self.candidate.staleness})"
        return "rollout tokens"


def candidates(config: SimConfig) -> list[Candidate]:
    """All feasible candidates, the one with the lowest bound first."""
    control = config.control
    source = Source(config.workload, control.group_size, control.max_response_tokens, config.seed)
    lengths = source.sample(min(512, 4 * control.groups_per_step))
    tokens = float(lengths.mean()) * control.groups_per_step * control.group_size
    longest = float(lengths.max())
    found: dict[tuple[int, int, int, int], Candidate] = {}
    sizes = product((config.rollout.devices, 2 * config.rollout.devices), sorted({*SLOTS, config.rollout.slots}))
    for devices, slots in sizes:
        for share in SHARES:
            trainer = round(config.devices * share / devices) * devices
            if trainer < 1 or config.devices - trainer < devices:
                continue
            for staleness in STALENESS:
                changed = _changed(config, devices, slots, trainer, staleness)
                try:
                    bound = lower_bound(changed, "disaggregated", staleness=staleness, tokens=tokens, longest=longest)
                except ConfigError:
                    continue  # the weights or a single trajectory do not fit into an instance of this size
                key = (devices, slots, trainer, staleness)
                found[key] = Candidate(config=changed, variant=parse_variant("dora"), bound=bound)
    if not found:
        raise ConfigError(
            f"'devices': {config.devices} devices can't hold a trainer and one rollout instance of "
            f"{config.rollout.devices}"
        )
    return sorted(found.values(), key=lambda it: (it.bound.seconds, it.staleness, it.trainer_devices, it.slots))


def _changed(config: SimConfig, devices: int, slots: int, trainer: int, staleness: int) -> SimConfig:
    grown = devices // config.rollout.devices
    return config.model_copy(
        update={
            "trainer_devices": trainer,
            "rollout": config.rollout.model_copy(
                update={"devices": devices, "slots": slots, "max_requests": config.rollout.max_requests * grown}
            ),
            "control": config.control.model_copy(update={"max_staleness": staleness, "mode": "dora"}),
        }
    )


def plan(
    config: SimConfig, *, most: int = 24, progress: Callable[[int, int], None] | None = None
) -> tuple[list[PlanResult], int]:
    """Simulate at most `most` candidates; return them best first, and how many were left out."""
    waiting = candidates(config)
    total = len(waiting)
    done: list[PlanResult] = []
    best = float("inf")
    for number, candidate in enumerate(waiting):
        if candidate.bound.seconds >= best or number >= most:
            break
        if progress is not None:
            progress(number, min(most, total))
        planned = PlanResult(candidate=candidate, result=simulate(candidate.config, candidate.variant))
        best = min(best, planned.step_seconds)
        done.append(planned)
    done.sort(key=lambda planned: (planned.step_seconds, planned.candidate.staleness))
    return done, total - len(done)
