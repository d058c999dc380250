"""Simulates one mode and measures it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dora_rl.core.activities import ActivityLabel, IdleReason
from dora_rl.core.errors import ConfigError
from dora_rl.core.events import Event
from dora_rl.core.interfaces import drive
from dora_rl.core.time_accounting import Activity, Timeline, activity_name, occupancy
from dora_rl.core.types import SECOND, Nanoseconds, SlotId, Version
from dora_rl.orchestrator.config import ControlConfig, Deadlines
from dora_rl.orchestrator.modes import MODES, LayoutKind
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.orchestrator.placement import PLACEMENT_RULES
from dora_rl.sim.config import SimConfig
from dora_rl.sim.lower_bound import LowerBound, lower_bound
from dora_rl.sim.runtime import SimRuntime

_NEVER = Deadlines(load=1e7, move=1e7, score=1e7, tool=1e7, heartbeat=1e7, progress=1e7, train=1e7, stall=1e7)
"""Deadlines that never pass: nothing fails in a simulation, and simulated steps may take hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A mode with changes to the preset: `dora`, `dora:elastic`, `dora:proportional`, `dora:k1`."""

    name: str
    mode: str
    elastic: bool = False
    placement: str | None = None
    staleness: int | None = None


def parse_variant(text: str) -> Variant:
    """Parse `mode[:option+option...]`."""
    mode, _, options = text.partition(":")
    if mode not in MODES:
        raise ConfigError(f"unknown mode '{mode}': choose from {', '.join(MODES)}")
    elastic = False
    placement: str | None = None
    staleness: int | None = None
    for option in filter(None, options.split("+")):
        if option == "elastic":
            elastic = True
        elif option in PLACEMENT_RULES:
            placement = option
        elif option[0] == "k" and option[1:].isdigit():
            staleness = int(option[1:])
        else:
            raise ConfigError(
                f"unknown option '{option}' in '{text}': use {', '.join(['elastic', *PLACEMENT_RULES])} or kN"
            )
    return Variant(name=text, mode=mode, elastic=elastic, placement=placement, staleness=staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements of one mode over the measured steps."""

    variant: Variant
    steps: int
    step_seconds: float
    tokens_per_second: float
    """Response tokens trained per second."""
    occupancy: float
    """Share of the time available to slots that they spent on requests."""
    idle: dict[str, float]
    """Share of slot time that was idle, by cause."""
    trainer: dict[str, float]
    """Share of the trainer's time by label, idle time by cause."""
    labels: dict[str, float]
    """Share of slot time by label."""
    staleness: dict[int, float]
    """Share of groups by staleness."""
    latency: float
    """Mean seconds from the admission of a group to its last reward."""
    live_versions: float
    """Mean number of versions with running requests when a version is published."""
    migrations: float
    """Requests moved per step."""
    swaps: int
    bounds: tuple[tuple[Version, int], ...]
    """The staleness bounds, each with the newest version when it came into force."""
    lower_bound: LowerBound
    over_lower_bound: float
    """Step time divided by its lower bound."""
    events: int
    timeline: Timeline | None

    @property
    def bound(self) -> int:
        """The staleness bound in force at the end."""
        return self.bounds[-1][1]

    @property
    def mean_staleness(self) -> float:
        return sum(lag * share for lag, share in self.staleness.items())

    @property
    def latency_in_steps(self) -> float:
        """Latency over step time: by Little's law the mean staleness of groups that are admitted at any time of a step
        and never wait for the trainer."""
        return self.latency / self.step_seconds

    @property
    def rollout_only(self) -> float:
        """Share of the trainer's time spent waiting for rollout."""
        reasons = (IdleReason.ROLLOUT, IdleReason.DEADLINE, IdleReason.REWARD, IdleReason.NO_PROMPTS)
        return sum(self.trainer.get(f"idle: {reason.value}", 0.0) for reason in reasons)


def control_for(config: SimConfig, variant: Variant) -> ControlConfig:
    """The orchestrator's config for a variant of a simulation."""
    changes: dict[str, object] = {"mode": variant.mode, "steps": None, "deadlines": _NEVER}
    if variant.placement is not None:
        changes["placement"] = variant.placement
    mode = MODES[variant.mode]
    if variant.staleness is not None:
        changes["max_staleness"] = variant.staleness
    elif config.control.adaptive and not mode.bound_can_change:
        if mode.bound is None:
            raise ConfigError(
                f"'control.max_staleness' can't be \"auto\" in mode '{variant.mode}', which keeps its bound: leave out "
                f"that mode, or write '{variant.mode}:kN' with a number N"
            )
        changes["max_staleness"] = mode.bound
    return config.control.model_copy(update=changes)


def simulate(
    config: SimConfig,
    variant: Variant,
    *,
    progress: Callable[[int], None] | None = None,
    timeline: bool = False,
) -> Result:
    """Run the production orchestrator against the simulated runtime."""
    control = control_for(config, variant)
    layout: LayoutKind = "elastic" if variant.elastic else config.layouts[variant.mode]
    runtime = MeasuredRuntime(
        config.model_copy(update={"control": control}), layout, keep_segments=timeline, progress=progress
    )
    _check_instances(config, layout, len(runtime.instances))
    drive(Orchestrator(control), runtime)
    runtime.close()
    return runtime.result(variant, layout)


def _check_instances(config: SimConfig, layout: LayoutKind, instances: int) -> None:
    if not instances:
        raise ConfigError(
            f"'devices': {config.devices} devices ({layout}) leave no room for a rollout instance of "
            f"{config.rollout.devices}"
        )


class MeasuredRuntime(SimRuntime):
    """A simulated runtime that measures the steps after the warm-up."""

    def __init__(
        self,
        config: SimConfig,
        layout: LayoutKind,
        *,
        keep_segments: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config, layout, keep_segments=keep_segments)
        self._progress = progress
        self._measured_from: Nanoseconds = 0
        self._before: Counter[Activity] = Counter()
        self._trainer_before: Counter[Activity] = Counter()
        self._moves_before = 0
        self._newest = -1

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[Event, Nanoseconds] | None:
        arrived = super().next_event(wake_at)
        newest = len(self.records.live_versions) - 1
        if newest != self._newest:
            self._newest = newest
            if newest == self.config.warmup_steps:
                self._start_measuring()
            if self._progress is not None:
                self._progress(newest)
        return arrived

    def _start_measuring(self) -> None:
        self.close()
        self._measured_from = self.now
        self._before = self._totals()
        self._trainer_before = Counter(self.trainer.totals)
        self._moves_before = sum(count for *_, count in self.moves)

    def _totals(self) -> Counter[Activity]:
        totals: Counter[Activity] = Counter()
        for instance in self.instances.values():
            for slot in instance.slot_list:
                totals.update(slot.account.totals)
        return totals

    def result(self, variant: Variant, layout: LayoutKind) -> Result:
        seconds = (self.now - self._measured_from) / SECOND
        first = self.config.warmup_steps
        records = [record for step, record in self.records.steps.items() if step >= first and record.finished_at]
        tokens = sum(record.tokens for record in records)
        staleness: Counter[int] = Counter()
        for record in records:
            staleness.update(record.staleness)
        groups = sum(record.groups for record in records)
        slots = self._totals() - self._before
        trainer = Counter(self.trainer.totals) - self._trainer_before
        live = [count for version, count in self.records.live_versions.items() if version > first]
        bound = lower_bound(
            self.config,
            layout,
            staleness=self._largest_bound(),
            tokens=tokens / len(records),
            longest=sum(record.longest for record in records) / len(records),
        )
        return Result(
            variant=variant,
            steps=len(records),
            step_seconds=seconds / len(records),
            tokens_per_second=tokens / seconds,
            occupancy=occupancy(_by_name(slots)),
            idle=_shares(slots, idle_only=True),
            trainer=_shares(trainer),
            labels=_shares(slots, by_label=True),
            staleness={lag: count / groups for lag, count in sorted(staleness.items())},
            latency=sum(record.latency for record in records) / groups / SECOND,
            live_versions=sum(live) / len(live),
            migrations=(sum(count for *_, count in self.moves) - self._moves_before) / len(records),
            swaps=sum(instance.swaps for instance in self.instances.values()),
            bounds=tuple(self.bounds),
            lower_bound=bound,
            over_lower_bound=seconds / len(records) / bound.seconds,
            events=self.events,
            timeline=self._timeline() if self.trainer.segments is not None else None,
        )

    def _largest_bound(self) -> int:
        """The largest staleness bound in force since the warm-up."""
        earlier = [bound for version, bound in self.bounds if version <= self.config.warmup_steps]
        later = [bound for version, bound in self.bounds if version > self.config.warmup_steps]
        return max(earlier[-1], *later, 0)

    def _timeline(self) -> Timeline:
        return Timeline(
            slots={
                SlotId(name, number): slot.account.segments or []
                for name, instance in self.instances.items()
                for number, slot in enumerate(instance.slot_list)
            },
            trainer=self.trainer.segments or [],
            moves=self.moves,
            published={
                step + 1: record.finished_at for step, record in self.records.steps.items() if record.finished_at
            },
            bounds=[(self.records.steps[version - 1].finished_at, bound) for version, bound in self.bounds[1:]],
            start=self._measured_from,
            end=self.now,
        )


def _by_name(totals: Counter[Activity]) -> Counter[str]:
    result: Counter[str] = Counter()
    for activity, spent in totals.items():
        result[activity_name(activity.label, "" if activity.cause is None else activity.cause.reason)] += spent
    return result


def _shares(totals: Counter[Activity], *, idle_only: bool = False, by_label: bool = False) -> dict[str, float]:
    whole = sum(totals.values())
    result: Counter[str] = Counter()
    for activity, spent in totals.items():
        if activity.label is ActivityLabel.IDLE and not by_label:
            assert activity.cause is not None
            cause = activity.cause.reason.value
            result[cause if idle_only else activity_name(activity.label, cause)] += spent
        elif not idle_only:
            result[activity.label.value] += spent
    return {name: spent / whole for name, spent in result.most_common()}
