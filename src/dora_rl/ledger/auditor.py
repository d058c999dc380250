"""An independent check of a run: follows every group through the event log and reports broken promises.

The auditor reads only events and commands. It shares no code with the orchestrator or the projections, so an error in
either of them can't hide itself.

Step n has trained a group once `Apply` named the group for step n and version n + 1 was published in answer. Repeated
commands must agree: a step that is trained again after a crash keeps its groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import Attempt, Fingerprint, GroupId, Nanoseconds, StepId, TrajectoryId, Version
from dora_rl.ledger.writer import LoggedEvent

Outcome = Literal["trained", "failed", "without signal", "live"]


class Terms(NamedTuple):
    """What the configuration of a run promises."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    mixes_versions: bool
    """Mode `partial`: a trajectory may have tokens of several versions."""
    steps: int | None
    """The number of steps that was asked for at the start; None: as many as the prompts suffice for."""
    dynamic_sampling: int = 0
    """Groups without signal are replaced if they are among the first so many times B groups of their version."""


class ExpectedTokens(NamedTuple):
    """What the ledger must have of the tokens of one trajectory."""

    version: Version
    length: int | None
    """Length of the whole response; None: any number of tokens is right."""
    deleted: bool
    """The trajectory won't be trained, or was trained and no checkpoint can need it again: its tokens must be gone."""


@dataclass(slots=True)
class _Group:
    prompt: str
    version: Version
    bound: int
    number: int
    """How many groups of its version were admitted before it."""
    ended: set[TrajectoryId] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    """Rewards of the trajectories that were finished."""
    failed: bool = False
    without_signal: bool = False


class Auditor:
    """Reads an event log from its beginning."""

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
        """Largest difference between a serving slot and the trainer."""
        self.pure = self.mixed = self.failed = 0
        self.moved = self.arrived = self.resumed = self.prefilled = 0
        self.instances_lost = self.trainers_lost = 0
        self._bound = terms.max_staleness
        self._steps_asked = terms.steps
        self._prompts_ended = False
        self._admitted: set[str] = set()
        self._of_version: Counter[Version] = Counter()
        self._attempts: dict[TrajectoryId, Attempt] = {}
        self._progress: dict[TrajectoryId, int] = {}
        self._generated: dict[TrajectoryId, int] = {}
        self._scored: set[TrajectoryId] = set()
        self._failed: set[TrajectoryId] = set()
        self._publishing: tuple[Version, Attempt] | None = None
        self._checkpointed: Version = 0
        self._taken: dict[GroupId, StepId] = {}

    # -- reading the log --------------------------------------------------------------------------------------

    def observe(self, entry: LoggedEvent) -> None:
        """Take in the next entry of the log."""
        self.events += 1
        if entry.at < self.at:
            self._report(f"event {entry.seq}: time ran backwards")
        self.at = entry.at
        self._event(entry.event)
        for command in entry.commands:
            self._command(command)

    def _event(self, event: e.Event) -> None:
        match event:
            case e.PromptsArrived(prompts=prompts, last=last):
                for prompt in prompts:
                    if prompt.key in self.offered:
                        self._report(f"prompt '{prompt.key}' was offered twice")
                    self.offered[prompt.key] = None
                self._prompts_ended = self._prompts_ended or last
            case e.SlotLoaded(slot=slot, version=version, fingerprint=fingerprint):
                self._check_fingerprint(f"slot {slot} loaded", version, fingerprint)
                self._check_load(event)
            case e.SlotLoadFailed(differs=True):
                self.differing += 1
            case e.Progress(tokens=tokens):
                for trajectory, count in tokens.items():
                    self._progress[trajectory] = max(count, self._progress.get(trajectory, 0))
            case e.Generated():
                self._generate(event)
            case e.Scored(trajectory=trajectory, reward=reward):
                ended = trajectory in self._failed or trajectory in self._scored
                if trajectory in self._generated and not ended:
                    self._end(trajectory, reward)
                    self._scored.add(trajectory)
            case e.Moved(trajectories=trajectories):
                self.arrived += len(trajectories)
            case e.Published():
                self._publish(event)
            case e.Checkpointed(version=version):
                self._checkpointed = max(self._checkpointed, version)
            case e.TrainerLost():
                self.trainers_lost += 1
                self._publishing = None
            case e.InstanceLost():
                self.instances_lost += 1
            case e.BoundChanged(max_staleness=bound):
                self._bound = bound
            case e.StepsChanged(steps=steps):
                self._change_steps(steps)
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
                self._publishing = (version, attempt)
            case c.FailTrajectory(trajectory=trajectory):
                self._failed.add(trajectory)
                self.failed += 1
                self._end(trajectory, None)
            case c.GroupFailed(group=group):
                if self._known(group):
                    self.groups[group].failed = True
            case c.GroupWithoutSignal():
                self._check_without_signal(command)
            case _:
                pass

    def _change_steps(self, steps: int) -> None:
        """Another number of steps is asked for: no fewer than before, and no more than that were trained by then."""
        if self._steps_asked is None or steps < self._steps_asked:
            self._report(f"{steps} steps are asked for, fewer than before")
        self.problems += self._excess_steps()
        self._steps_asked = steps

    def _excess_steps(self) -> list[str]:
        if self._steps_asked is None or self.steps <= self._steps_asked:
            return []
        return [f"{self.steps} steps were trained, and {self._steps_asked} were asked for"]

    def _start(self, command: c.StartGroup) -> None:
        key = command.prompt.key
        if command.group != len(self.groups):
            self._report(f"group {command.group} was admitted as number {len(self.groups)}")
        if key in self._admitted:
            self._report(f"prompt '{key}' was admitted twice")
        if key not in self.offered:
            self._report(f"prompt '{key}' was admitted but never offered")
        if command.version not in self.fingerprints:
            self._report(f"group {command.group} was admitted under version {command.version}, which was not published")
        self._admitted.add(key)
        self.groups.append(_Group(key, command.version, self._bound, self._of_version[command.version]))
        self._of_version[command.version] += 1

    def _generate(self, event: e.Generated) -> None:
        trajectory = event.trajectory
        if event.attempt != self._attempts.get(trajectory, 0) or trajectory in self._failed:
            return  # a late report of an earlier attempt
        if trajectory in self._generated or not self._known(trajectory // self.terms.group_size):
            return
        self._generated[trajectory] = event.tokens
        self._check_fingerprint(f"trajectory {trajectory} was served", event.version, event.fingerprint)
        if event.version == self.groups[trajectory // self.terms.group_size].version:
            self.pure += 1
        elif self.terms.mixes_versions:
            self.mixed += 1
        else:
            self._report(f"trajectory {trajectory} was served by version {event.version}, which is not its group's")

    def _apply(self, command: c.Apply) -> None:
        step, groups = command.step, command.groups
        if step in self.batches:
            if sorted(self.batches[step]) != sorted(groups):
                self._report(f"step {step} was trained again with other groups")
            return
        self.batches[step] = groups
        if len(groups) > self.terms.groups_per_step:
            self._report(f"step {step} has {len(groups)} groups, more than the {self.terms.groups_per_step} of a step")
        for group in groups:
            self._check_trained(step, group)

    def _check_trained(self, step: StepId, group: GroupId) -> None:
        if not self._known(group):
            self._report(f"step {step} trains group {group}, which was never admitted")
            return
        known = self.groups[group]
        if len(known.ended) != self.terms.group_size or not known.rewards:
            self._report(f"step {step} trains group {group} before it has ended")
        if known.failed:
            self._report(f"group {group} has failed and is trained in step {step}")
        if known.without_signal:
            self._report(f"group {group} ended without signal and is trained in step {step}")
        elif self._replaceable(known) and len(set(known.rewards)) == 1:
            self._report(f"step {step} trains group {group}, which has no signal and should have been replaced")
        if not 0 <= step - known.version <= known.bound:
            self._report(
                f"group {group} of version {known.version} is trained in step {step}: the bound is {known.bound}"
            )
        if group in self._taken:
            self._report(f"group {group} is trained in step {self._taken[group]} and again in step {step}")
        self._taken.setdefault(group, step)

    def _check_without_signal(self, command: c.GroupWithoutSignal) -> None:
        """The group has ended, its rewards are all equal, and it was to be replaced for that."""
        group = command.group
        if not self._known(group):
            self._report(f"group {group} ended without signal and was never admitted")
            return
        known = self.groups[group]
        if known.without_signal:
            self._report(f"group {group} ended without signal twice")
        if known.failed or group in self._taken:
            self._report(f"group {group} has failed or is trained, and ended without signal")
        if len(known.ended) != self.terms.group_size or set(known.rewards) != {command.reward}:
            self._report(f"group {group} ended without signal, but its rewards are not all {command.reward:g}")
        if not self._replaceable(known):
            self._report(f"group {group} ended without signal, and the settings say that it is trained")
        known.without_signal = True

    def _replaceable(self, group: _Group) -> bool:
        return group.number < self.terms.dynamic_sampling * self.terms.groups_per_step

    def _publish(self, event: e.Published) -> None:
        if self._publishing != (event.version, event.attempt) or event.version in self.fingerprints:
            return
        self.fingerprints[event.version] = event.fingerprint
        self.probes[event.version] = event.probe
        if event.version and event.version - 1 not in self.batches:
            self._report(f"version {event.version} was published without a step that leads to it")
        for group in self.batches.get(event.version - 1, ()):
            if self._known(group):
                self.trained[group] = event.version - 1

    def _end(self, trajectory: TrajectoryId, reward: float | None) -> None:
        """A trajectory has ended, with its reward if it was finished."""
        group = trajectory // self.terms.group_size
        if self._known(group):
            self.groups[group].ended.add(trajectory)
            if reward is not None:
                self.groups[group].rewards.append(reward)

    def _check_fingerprint(self, what: str, version: Version, fingerprint: Fingerprint) -> None:
        if self.fingerprints.get(version) != fingerprint:
            self._report(f"{what} from weights that are not the published version {version}: {fingerprint[:16]}")

    def _check_load(self, event: e.SlotLoaded) -> None:
        """A slot that serves was compared with the probe of its version, and differed by no more than is allowed."""
        self.loads += 1
        result, published = event.probe, self.probes.get(event.version, "")
        if result is None:
            if published:
                self._report(f"slot {event.slot} serves version {event.version} and was not probed")
            return
        self.probed += 1
        self.widest = max(self.widest, result.difference, key=lambda gap: math.inf if math.isnan(gap) else gap)
        if result.digest != published:
            self._report(
                f"slot {event.slot} was compared with another probe than was published with version {event.version}"
            )
        if not result.difference <= result.tolerance:
            self._report(
                f"slot {event.slot} serves version {event.version} but differs from the trainer by "
                f"{result.difference:.3g}, and {result.tolerance:.3g} is allowed"
            )

    def _known(self, group: GroupId) -> bool:
        return 0 <= group < len(self.groups)

    def _report(self, problem: str) -> None:
        self.problems.append(problem)

    # -- results ----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of steps whose version is published."""
        return max(self.fingerprints, default=0)

    @property
    def finished(self) -> bool:
        """The run has done all that was asked for."""
        enough = self._steps_asked is not None and self.steps >= self._steps_asked
        exhausted = self._prompts_ended and len(self.offered) == len(self.groups)
        return (enough or exhausted) and all(self.outcome(group) != "live" for group in range(len(self.groups)))

    def outcome(self, group: GroupId) -> Outcome:
        """Whether a group was trained, has failed, ended without signal, or is still live."""
        if group in self.trained:
            return "trained"
        if self.groups[group].failed:
            return "failed"
        return "without signal" if self.groups[group].without_signal else "live"

    def final_problems(self) -> Iterator[str]:
        """Problems that only the whole log can show."""
        for step in sorted(self.batches)[:-1]:
            if len(self.batches[step]) != self.terms.groups_per_step:
                yield f"step {step} has {len(self.batches[step])} groups and is not the last"
        yield from self._excess_steps()
        if self._steps_asked is not None and self.steps == self._steps_asked:
            live = [group for group in range(len(self.groups)) if self.outcome(group) == "live"]
            if live:
                yield f"all steps are done, and groups {live[:5]} have not ended"

    def complete(self) -> set[TrajectoryId]:
        """Trajectories that have ended and whose tokens must all be in the ledger."""
        return {
            trajectory
            for trajectory in self._generated
            if (expected := self.expected_tokens(trajectory)) is not None and expected.length is not None
        }

    def expected_tokens(self, trajectory: TrajectoryId) -> ExpectedTokens | None:
        """What the ledger must have of a trajectory; None: the trajectory was never started."""
        group = trajectory // self.terms.group_size
        if trajectory < 0 or not self._known(group):
            return None
        step = self._taken.get(group)
        deleted = self.groups[group].without_signal or (step is not None and step < self._checkpointed)
        return ExpectedTokens(self.groups[group].version, None if deleted else self._generated.get(trajectory), deleted)
