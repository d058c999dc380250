"""What became of every group, worked out from events and commands alone.

A group is trained by step n once `Apply` named it for step n and version n + 1 was published in answer. What is said
twice must be said alike: a step that is trained again after a crash keeps its groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Attempt, Fingerprint, GroupId, Nanoseconds, StepId, TrajectoryId, Version
from dora_rl.ledger.ledger import Logged


class Terms(NamedTuple):
    """What the run has promised, from its configuration."""

    groups_per_step: int
    group_size: int
    staleness: int
    mixes: bool
    """Mode `partial`: a trajectory may have tokens of several versions."""
    steps: int | None
    """How many were asked for; None: as many as the prompts give."""


class Fate(NamedTuple):
    """A trajectory, as far as what it said is concerned."""

    version: Version
    tokens: int | None
    """Of its whole response, if that is known and must be there."""
    over: bool
    """Trained, and no checkpoint can ask for it again."""


@dataclass(slots=True)
class _Group:
    prompt: str
    version: Version
    bound: int
    ended: set[TrajectoryId] = field(default_factory=set)
    survivors: int = 0
    verdict: bool = False


class Auditor:
    """Reads a log from its beginning."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.problems: list[str] = []
        self.events = 0
        self.at: Nanoseconds = 0
        self.offered: dict[str, None] = {}
        self.groups: list[_Group] = []
        self.batches: dict[StepId, tuple[GroupId, ...]] = {}
        self.trained: dict[GroupId, StepId] = {}
        self.fingerprints: dict[Version, Fingerprint] = {}
        self.probes: dict[Version, str] = {}
        """Digests of the probes that versions were published with."""
        self.loads = self.probed = self.differing = 0
        self.widest = 0.0
        """Largest difference between a slot that serves and the trainer."""
        self.pure = self.mixed = self.failed = 0
        self.moved = self.arrived = self.resumed = self.prefilled = 0
        self.instances_lost = self.trainers_lost = 0
        self._bound = terms.staleness
        self._prompts_ended = False
        self._admitted: set[str] = set()
        self._attempts: dict[TrajectoryId, Attempt] = {}
        self._progress: dict[TrajectoryId, int] = {}
        self._generated: dict[TrajectoryId, int] = {}
        self._scored: set[TrajectoryId] = set()
        self._failed: set[TrajectoryId] = set()
        self._asked: tuple[Version, Attempt] | None = None
        self._checkpointed: Version = 0
        self._taken: dict[GroupId, StepId] = {}

    # -- what happened ----------------------------------------------------------------------------------------

    def observe(self, logged: Logged) -> None:
        """The next line of the log."""
        self.events += 1
        if logged.at < self.at:
            self._blame(f"event {logged.seq}: time ran backwards")
        self.at = logged.at
        self._event(logged.event)
        for command in logged.commands:
            self._command(command)

    def _event(self, event: e.Event) -> None:
        match event:
            case e.PromptsArrived(prompts=prompts, last=last):
                for prompt in prompts:
                    if prompt.key in self.offered:
                        self._blame(f"prompt '{prompt.key}' was handed out twice")
                    self.offered[prompt.key] = None
                self._prompts_ended = self._prompts_ended or last
            case e.SlotLoaded(slot=slot, version=version, fingerprint=fingerprint):
                self._prove(f"slot {slot} loaded", version, fingerprint)
                self._load(event)
            case e.SlotLoadFailed(differs=True):
                self.differing += 1
            case e.Progress(tokens=tokens):
                for trajectory, count in tokens.items():
                    self._progress[trajectory] = max(count, self._progress.get(trajectory, 0))
            case e.Generated():
                self._generate(event)
            case e.Scored(trajectory=trajectory):
                if trajectory in self._generated and trajectory not in self._failed:
                    self._end(trajectory, survived=trajectory not in self._scored)
                    self._scored.add(trajectory)
            case e.Moved(trajectories=trajectories):
                self.arrived += len(trajectories)
            case e.Published():
                self._publish(event)
            case e.Checkpointed(version=version):
                self._checkpointed = max(self._checkpointed, version)
            case e.TrainerLost():
                self.trainers_lost += 1
                self._asked = None
            case e.InstanceLost():
                self.instances_lost += 1
            case e.BoundChanged(max_staleness=bound):
                self._bound = bound
            case _:
                pass

    def _command(self, command: c.Command) -> None:
        match command:
            case c.StartGroup():
                self._start(command)
            case c.Resume(trajectory=trajectory):
                self._attempts[trajectory] = command.attempt
                self.resumed += 1
                self.prefilled += command.prompt.tokens + self._progress.get(trajectory, 0)
            case c.Move(trajectories=trajectories):
                self.moved += len(trajectories)
            case c.Apply():
                self._apply(command)
            case c.Publish(version=version, attempt=attempt):
                self._asked = (version, attempt)
            case c.FailTrajectory(trajectory=trajectory):
                self._failed.add(trajectory)
                self.failed += 1
                self._end(trajectory, survived=False)
            case c.GroupFailed(group=group):
                if self._known(group):
                    self.groups[group].verdict = True
            case _:
                pass

    def _start(self, command: c.StartGroup) -> None:
        key = command.prompt.key
        if command.group != len(self.groups):
            self._blame(f"group {command.group} was admitted as number {len(self.groups)}")
        if key in self._admitted:
            self._blame(f"prompt '{key}' was admitted twice")
        if key not in self.offered:
            self._blame(f"prompt '{key}' was admitted, but never handed out")
        if command.version not in self.fingerprints:
            self._blame(f"group {command.group} was admitted under version {command.version}, which was not published")
        self._admitted.add(key)
        self.groups.append(_Group(key, command.version, self._bound))

    def _generate(self, event: e.Generated) -> None:
        trajectory = event.trajectory
        if event.attempt != self._attempts.get(trajectory, 0) or trajectory in self._failed:
            return  # a late report of a former attempt
        if trajectory in self._generated or not self._known(trajectory // self.terms.group_size):
            return
        self._generated[trajectory] = event.tokens
        self._prove(f"trajectory {trajectory} was served", event.version, event.fingerprint)
        if event.version == self.groups[trajectory // self.terms.group_size].version:
            self.pure += 1
        elif self.terms.mixes:
            self.mixed += 1
        else:
            self._blame(f"trajectory {trajectory} was served by version {event.version}, not by that of its group")

    def _apply(self, command: c.Apply) -> None:
        step, groups = command.step, command.groups
        if step in self.batches:
            if sorted(self.batches[step]) != sorted(groups):
                self._blame(f"step {step} was trained again with other groups")
            return
        self.batches[step] = groups
        if len(groups) > self.terms.groups_per_step:
            self._blame(f"step {step} has {len(groups)} groups, and {self.terms.groups_per_step} are a step")
        for group in groups:
            self._check_trained(step, group)

    def _check_trained(self, step: StepId, group: GroupId) -> None:
        if not self._known(group):
            self._blame(f"step {step} trains group {group}, which was never admitted")
            return
        known = self.groups[group]
        if len(known.ended) != self.terms.group_size or not known.survivors:
            self._blame(f"step {step} trains group {group} before it has ended")
        if known.verdict:
            self._blame(f"group {group} has a verdict and is trained in step {step}")
        if not 0 <= step - known.version <= known.bound:
            self._blame(
                f"group {group} of version {known.version} is trained in step {step}: the bound is {known.bound}"
            )
        if group in self._taken:
            self._blame(f"group {group} is trained in step {self._taken[group]} and again in step {step}")
        self._taken.setdefault(group, step)

    def _publish(self, event: e.Published) -> None:
        if self._asked != (event.version, event.attempt) or event.version in self.fingerprints:
            return
        self.fingerprints[event.version] = event.fingerprint
        self.probes[event.version] = event.probe
        if event.version and event.version - 1 not in self.batches:
            self._blame(f"version {event.version} was published without a step that leads to it")
        for group in self.batches.get(event.version - 1, ()):
            if self._known(group):
                self.trained[group] = event.version - 1

    def _end(self, trajectory: TrajectoryId, *, survived: bool) -> None:
        group = trajectory // self.terms.group_size
        if self._known(group):
            self.groups[group].ended.add(trajectory)
            self.groups[group].survivors += survived

    def _prove(self, what: str, version: Version, fingerprint: Fingerprint) -> None:
        if self.fingerprints.get(version) != fingerprint:
            self._blame(f"{what} from weights that are not the published version {version}: {fingerprint[:16]}")

    def _load(self, event: e.SlotLoaded) -> None:
        """A slot that serves was compared with the probe of its version, and was near enough."""
        self.loads += 1
        result, published = event.probe, self.probes.get(event.version, "")
        if result is None:
            if published:
                self._blame(f"slot {event.slot} serves version {event.version}, and was not probed")
            return
        self.probed += 1
        self.widest = max(self.widest, result.difference, key=lambda gap: math.inf if math.isnan(gap) else gap)
        if result.digest != published:
            self._blame(
                f"slot {event.slot} was compared with another probe than was published with version {event.version}"
            )
        if not result.difference <= result.tolerance:
            self._blame(
                f"slot {event.slot} serves version {event.version}, but differs from the trainer by "
                f"{result.difference:.3g}, and {result.tolerance:.3g} is allowed"
            )

    def _known(self, group: GroupId) -> bool:
        return 0 <= group < len(self.groups)

    def _blame(self, problem: str) -> None:
        self.problems.append(problem)

    # -- what became of it ------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps whose version is published."""
        return max(self.fingerprints, default=0)

    @property
    def finished(self) -> bool:
        """All that was asked for is done."""
        enough = self.terms.steps is not None and self.steps >= self.terms.steps
        exhausted = self._prompts_ended and len(self.offered) == len(self.groups)
        return (enough or exhausted) and all(self.outcome(group) != "live" for group in range(len(self.groups)))

    def outcome(self, group: GroupId) -> str:
        """What became of a group."""
        if group in self.trained:
            return "trained"
        return "with a verdict" if self.groups[group].verdict else "live"

    def at_the_end(self) -> Iterator[str]:
        """What can be said only of the whole log."""
        for step in sorted(self.batches)[:-1]:
            if len(self.batches[step]) != self.terms.groups_per_step:
                yield f"step {step} has {len(self.batches[step])} groups and is not the last"
        if self.terms.steps is not None and self.steps > self.terms.steps:
            yield f"{self.steps} steps were trained, and {self.terms.steps} were asked for"
        if self.terms.steps is not None and self.steps == self.terms.steps:
            live = [group for group in range(len(self.groups)) if self.outcome(group) == "live"]
            if live:
                yield f"all steps are done, and groups {live[:5]} were neither trained nor have a verdict"

    def kept(self) -> set[TrajectoryId]:
        """Trajectories that have ended and whose tokens must be there."""
        return {one for one in self._generated if (fate := self.fate(one)) is not None and fate.tokens is not None}

    def fate(self, trajectory: TrajectoryId) -> Fate | None:
        """Of one trajectory; None: it was never begun."""
        group = trajectory // self.terms.group_size
        if trajectory < 0 or not self._known(group):
            return None
        step = self._taken.get(group)
        over = step is not None and step < self._checkpointed
        return Fate(self.groups[group].version, None if over else self._generated.get(trajectory), over)
