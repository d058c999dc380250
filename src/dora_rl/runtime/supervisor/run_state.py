"""What the supervisor derives from the event log besides trajectories: versions, instances, and work that is open.

It is a projection: live it provides the newest version, the bound and the number of steps in force; when a run is
resumed it says which processes are gone and which commands still have no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import InstanceId, Nanoseconds, TrajectoryId, Version


class RunState:
    """The state of one run."""

    def __init__(self, max_staleness: int, steps: int | None = None) -> None:
        self.at: Nanoseconds = 0
        """Time of the last event."""
        self.newest: Version | None = None
        """The newest published version."""
        self.bound = max_staleness
        """The staleness bound under which groups are admitted."""
        self.steps = steps
        """The number of steps that are asked for; None: as many as the prompts suffice for."""
        self.held: set[Version] = set()
        """Versions that were published and not retired."""
        self.incarnations: dict[str, int] = {}
        """The last incarnation of each instance: a process name is never used again."""
        self._instances: dict[InstanceId, None] = {}
        self._scores: dict[TrajectoryId, c.Score] = {}
        self._fetch: c.FetchPrompts | None = None
        self._retired: list[c.Retire] = []

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> None:
        """Fold an event and the commands that answered it."""
        self.at = at
        match event:
            case e.InstanceJoined(spec=spec):
                self._instances[spec.instance] = None
                worker, _, incarnation = spec.instance.rpartition(".")
                self.incarnations[worker] = max(int(incarnation), self.incarnations.get(worker, 0))
            case e.InstanceLost(instance=instance):
                self._instances.pop(instance, None)
            case e.Scored(trajectory=trajectory) | e.TrajectoryFailed(trajectory=trajectory):
                self._scores.pop(trajectory, None)
            case e.PromptsArrived():
                self._fetch = None
            case e.BoundChanged(max_staleness=bound):
                self.bound = bound
            case e.StepsChanged(steps=steps):
                self.steps = steps
            case e.Published(version=version):
                self.newest = version if self.newest is None else max(self.newest, version)
                self.held.add(version)
            case _:
                pass
        for command in commands:
            self._apply_command(command)

    def _apply_command(self, command: c.Command) -> None:
        match command:
            case c.Score(trajectory=trajectory):
                self._scores[trajectory] = command
            case c.FailTrajectory(trajectory=trajectory):
                self._scores.pop(trajectory, None)
            case c.FetchPrompts():
                self._fetch = command
            case c.Retire():
                self._retired.append(command)
                self.held.discard(command.version)
            case c.EvictInstance(instance=instance):
                self._instances.pop(instance, None)
            case _:
                pass

    def losses(self, reason: str) -> Iterator[e.Event]:
        """Report that all processes of a former supervisor are gone."""
        for instance in self._instances:
            yield e.InstanceLost(instance=instance, reason=reason)
        yield e.TrainerLost(reason=reason)

    def open_commands(self) -> Iterator[c.Command]:
        """Commands that have no answer yet, or that may not have been carried out."""
        yield from self._scores.values()
        yield from self._retired
        if self._fetch is not None:
            yield self._fetch
