"""Simulated runs, recorded for pictures: what each slot and the trainer do at every moment.

The simulator's own timeline says that a slot decodes. A picture must also show how full its batch is, because a slot
that decodes one straggler is nearly empty; so every change of a batch is recorded as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dora_rl.core.activities import ActivityLabel
from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.interfaces import drive
from dora_rl.core.time_accounting import Segment
from dora_rl.core.types import Nanoseconds, SlotId, Version
from dora_rl.orchestrator.modes import LayoutKind
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.config import SimConfig
from dora_rl.sim.run import control_for, parse_variant
from dora_rl.sim.runtime import SimRuntime


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a slot does from `start` to `end`."""

    start: Nanoseconds
    end: Nanoseconds
    label: ActivityLabel
    version: Version | None
    cause: str
    requests: int
    """Requests in the batch of the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One simulated run of a mode."""

    mode: str
    slots: dict[SlotId, list[Moment]]
    trainer: list[Segment]
    moves: list[tuple[Nanoseconds, SlotId, SlotId, int]]
    """Time, source, target and number of requests of each move."""
    published: dict[Version, Nanoseconds]

    @property
    def fullest(self) -> int:
        """The most requests that a slot had at once."""
        return max(moment.requests for moments in self.slots.values() for moment in moments)

    def last_end(self, version: Version) -> Nanoseconds:
        """When the last request of a version ended."""
        return max(
            moment.end
            for moments in self.slots.values()
            for moment in moments
            if moment.requests and moment.version == version
        )

    def version_before(self, slot: SlotId, time: Nanoseconds) -> Version | None:
        """The version of the requests that a slot had last before a time."""
        return [moment.version for moment in self.slots[slot] if moment.requests and moment.start < time][-1]


class _RecordedRuntime(SimRuntime):
    def __init__(self, config: SimConfig, layout: LayoutKind) -> None:
        super().__init__(config, layout, keep_segments=True)
        self.slots: dict[SlotId, list[Moment]] = {
            SlotId(name, number): []
            for name, instance in self.instances.items()
            for number in range(len(instance.slot_list))
        }
        self._since: dict[SlotId, Moment] = {}

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[Event, Nanoseconds] | None:
        arrived = super().next_event(wake_at)
        self._record()
        return arrived

    def execute(self, commands: Iterable[Command]) -> None:
        super().execute(commands)
        self._record()

    def _record(self) -> None:
        for slot, moments in self.slots.items():
            state = self.instances[slot.instance].slot_list[slot.number]
            activity = state.account.current
            current = Moment(
                start=self.now,
                end=self.now,
                label=activity.label,
                version=state.version,
                cause="" if activity.cause is None else str(activity.cause),
                requests=state.active,
            )
            before = self._since.get(slot)
            if before is None:
                self._since[slot] = current
            elif _state(before) != _state(current):
                self._end(moments, before)
                self._since[slot] = current

    def _end(self, moments: list[Moment], moment: Moment) -> None:
        if self.now > moment.start:
            moments.append(
                Moment(
                    start=moment.start,
                    end=self.now,
                    label=moment.label,
                    version=moment.version,
                    cause=moment.cause,
                    requests=moment.requests,
                )
            )

    def close(self) -> None:
        super().close()
        for slot, moment in self._since.items():
            self._end(self.slots[slot], moment)
        self._since.clear()


def _state(moment: Moment) -> tuple[object, ...]:
    return moment.label, moment.version, moment.cause, moment.requests


def record(config: SimConfig, mode: str) -> Recording:
    """Simulate a mode with the orchestrator of real runs, and record it."""
    variant = parse_variant(mode)
    control = control_for(config, variant)
    runtime = _RecordedRuntime(config.model_copy(update={"control": control}), config.layouts[variant.mode])
    drive(Orchestrator(control), runtime)
    runtime.close()
    return Recording(
        mode=mode,
        slots=runtime.slots,
        trainer=runtime.trainer.segments or [],
        moves=runtime.moves,
        published={
            step + 1: record.finished_at for step, record in runtime.records.steps.items() if record.finished_at
        },
    )
