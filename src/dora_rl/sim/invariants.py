"""Checks the promises of docs/architecture.md during a run and raises `BrokenPromiseError` at the first broken one.

The checker is independent of how the orchestrator decides: it reads only the events and commands between orchestrator
and runtime, and the public snapshot. It can therefore check a test, a simulation, or the replay of a real run.
"""

from __future__ import annotations

from collections import Counter

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import IdleReason
from dora_rl.core.types import GroupId, InstanceId, StepId, TrajectoryId, Version
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.snapshot import SlotView, Snapshot


class BrokenPromiseError(AssertionError):
    """One of the promises in docs/architecture.md does not hold."""


def require(holds: bool, promise: str) -> None:
    """Raise if a promise does not hold."""
    if not holds:
        raise BrokenPromiseError(promise)


class InvariantChecker:
    """Checks one run, event by event."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._mode = config.mode_spec
        self._bound = config.staleness
        self.offered: list[str] = []
        self.admitted: list[tuple[str, Version]] = []
        """Prompt key and version of each group, by its id."""
        self.bounds: list[int] = []
        """The bound under which each group was admitted, by its id."""
        self.batches: dict[StepId, tuple[GroupId, ...]] = {}
        self.trained: dict[GroupId, StepId] = {}
        self.failed: set[GroupId] = set()
        self.without_signal: set[GroupId] = set()
        self.staleness: Counter[int] = Counter()
        self.moves = 0
        self.resumed = 0
        self._ended: set[TrajectoryId] = set()
        self._failed: set[TrajectoryId] = set()
        self._scored: Counter[TrajectoryId] = Counter()
        self._rewards: dict[TrajectoryId, float] = {}
        """The first reward of each trajectory; a trajectory that fails has none."""
        self._attempts: dict[TrajectoryId, int] = {}
        self._newest: Version | None = None
        self._applied = 0
        """Attempt of the last `Apply`."""
        self._publishing: tuple[Version, int] | None = None
        """Version and attempt of the last `Publish`."""
        self._published: set[Version] = set()
        self.retired: set[Version] = set()
        self._lost: set[InstanceId] = set()

    def observe(self, event: e.Event, commands: list[c.Command]) -> None:
        """Check one step of the orchestrator."""
        if isinstance(event, e.PromptsArrived):
            self.offered += [prompt.key for prompt in event.prompts]
        elif isinstance(event, e.Scored):
            self._ended.add(event.trajectory)
            if self._scored[event.trajectory]:
                self._rewards.setdefault(event.trajectory, event.reward)
        elif isinstance(event, e.InstanceLost):
            self._lost.add(event.instance)
        elif isinstance(event, e.Published):
            self._note_published(event)
        elif isinstance(event, e.TrainerLost):
            self._publishing = None
        elif isinstance(event, e.BoundChanged):
            self._bound = event.max_staleness
        for command in commands:
            if isinstance(event, e.Generated) and isinstance(command, c.Score):
                latest = self._attempts.get(event.trajectory, 0)
                require(
                    event.attempt == latest, f"C2: trajectory {event.trajectory} ends by a report of an earlier attempt"
                )
            if isinstance(event, e.Trained) and isinstance(command, c.Publish):
                require(event.attempt == self._applied, f"C2: step {event.step} ends by a report of an earlier trainer")
            self._check(command)

    def _note_published(self, event: e.Published) -> None:
        if self._publishing == (event.version, event.attempt) and event.version not in self._published:
            self._newest = event.version
            self._published.add(event.version)
            for group in self.batches.get(event.version - 1, ()):
                self.trained[group] = event.version - 1

    def _check(self, command: c.Command) -> None:
        match command:
            case c.StartGroup():
                self._check_start(command)
            case c.Resume():
                self.resumed += 1
                self._attempts[command.trajectory] = command.attempt
                self._check_version_usable(command.version)
                self._check_single(command.trajectory, command.version)
            case c.Move():
                self.moves += len(command.trajectories)
                for trajectory in command.trajectories:
                    self._check_single(trajectory, command.version)
            case c.LoadVersion():
                self._check_version_usable(command.version)
                require(command.slot.instance not in self._lost, f"{command.slot} is lost and is given a load")
                require(
                    not command.in_flight or self._mode.mixes_versions,
                    f"C1: {command.slot} loads version {command.version} under running requests",
                )
            case c.Score():
                self._scored[command.trajectory] += 1
                require(self._scored[command.trajectory] == 1, f"trajectory {command.trajectory} is scored twice")
            case c.Apply():
                self._applied = command.attempt
                self._check_batch(command)
            case c.Publish():
                self._publishing = (command.version, command.attempt)
            case c.RestartTrainer():
                self._publishing = None
            case c.Retire():
                require(command.version not in self.retired, f"version {command.version} is retired twice")
                require(command.version != self._newest, f"the newest version {command.version} is retired")
                self.retired.add(command.version)
            case c.FailTrajectory():
                require(bool(command.reason), f"trajectory {command.trajectory} fails without a reason")
                self._ended.add(command.trajectory)
                self._failed.add(command.trajectory)
            case c.GroupFailed():
                require(command.group not in self.failed, f"group {command.group} fails twice")
                require(bool(command.reasons), f"group {command.group} fails without a reason")
                self.failed.add(command.group)
            case c.GroupWithoutSignal():
                self._check_without_signal(command)
            case c.EvictInstance():
                self._lost.add(command.instance)
            case _:
                pass

    def _check_start(self, command: c.StartGroup) -> None:
        group = len(self.admitted)
        require(command.group == group, f"group {command.group} is admitted out of order")
        require(group < len(self.offered), f"group {group} is admitted without a prompt")
        require(command.prompt.key == self.offered[group], f"C2: group {group} does not get the next prompt")
        require(self._newest is not None, f"group {group} is admitted before a version is published")
        if self._mode.admits_newest_only:
            require(command.version == self._newest, f"group {group} is not tagged with the newest version")
        self._check_version_usable(command.version)
        self.admitted.append((command.prompt.key, command.version))
        self.bounds.append(self._bound)
        untrained = len(self.admitted) - len(self.trained) - len(self.failed) - len(self.without_signal)
        require(
            untrained <= (self._bound + 1) * self._config.groups_per_step,
            f"C3: {untrained} groups are untrained at once",
        )

    def _check_without_signal(self, command: c.GroupWithoutSignal) -> None:
        group = command.group
        others = self.failed | self.without_signal | {one for batch in self.batches.values() for one in batch}
        require(group not in others, f"C2: group {group} ended and then ends without signal")
        rewards = self._group_rewards(group)
        require(rewards == {command.reward}, f"group {group} ends without signal, and its rewards are {rewards}")
        require(self._replaceable(group), f"group {group} ends without signal beyond the limit of its version")
        self.without_signal.add(group)

    def _group_rewards(self, group: GroupId) -> set[float]:
        """The different rewards of a group, all of whose trajectories must have ended."""
        size = self._config.group_size
        siblings = range(group * size, (group + 1) * size)
        ended = all(trajectory in self._ended for trajectory in siblings)
        require(ended, f"group {group} ends before all its trajectories have ended")
        return {self._rewards[one] for one in siblings if one not in self._failed}

    def _replaceable(self, group: GroupId) -> bool:
        """Whether the group is replaced if it has no signal: it is among the first ones of its version."""
        version = self.admitted[group][1]
        before = sum(other == version for _, other in self.admitted[:group])
        return before < self._config.dynamic_sampling * self._config.groups_per_step

    def _check_version_usable(self, version: Version) -> None:
        require(version in self._published, f"version {version} is used before it is published")
        require(version not in self.retired, f"version {version} is used after it was retired")

    def _check_single(self, trajectory: TrajectoryId, version: Version) -> None:
        group = trajectory // self._config.group_size
        tagged = self.admitted[group][1]
        require(
            version == tagged or self._mode.mixes_versions,
            f"C1: trajectory {trajectory} of version {tagged} is sent to version {version}",
        )

    def _check_batch(self, command: c.Apply) -> None:
        step, groups = command.step, command.groups
        require(len(set(groups)) == len(groups), f"C2: step {step} trains a group twice")
        if step in self.batches:
            require(set(self.batches[step]) == set(groups), f"C2: step {step} is trained again with another batch")
            return
        require(step == self._newest, f"step {step} does not start from the newest version {self._newest}")
        before = {group for batch in self.batches.values() for group in batch}
        for group in groups:
            version = self.admitted[group][1]
            require(group not in before, f"C2: group {group} is trained twice")
            require(group not in self.failed, f"C2: group {group} has failed and is trained")
            require(group not in self.without_signal, f"C2: group {group} ended without signal and is trained")
            no_signal = len(self._group_rewards(group)) < 2 and self._replaceable(group)
            require(not no_signal, f"group {group} has no signal and is trained instead of being replaced")
            require(
                0 <= step - version <= self.bounds[group],
                f"C3: step {step} trains a group of version {version}, admitted under the bound {self.bounds[group]}",
            )
            self.staleness[step - version] += 1
        self.batches[step] = groups

    # -- the state between events -----------------------------------------------------------------------------

    def check_outcomes(self, snapshot: Snapshot) -> None:
        """Every admitted group is live or has one outcome, and the orchestrator counts them as they were reported."""
        counts = (snapshot.admitted, snapshot.trained, snapshot.failed, snapshot.without_signal)
        found = tuple(map(len, (self.admitted, self.trained, self.failed, self.without_signal)))
        require(counts == found, f"C2: outcomes are counted as {counts}, and {found} were reported")
        live = sum(snapshot.untrained.values())
        require(snapshot.admitted == sum(counts[1:]) + live, f"C2: of {counts} groups {live} are live")

    def check_idle_slots(self, snapshot: Snapshot) -> None:
        """No slot is idle while there is work for it, and every idle slot has a cause."""
        for slot in snapshot.slots:
            held = {slot.version, slot.loading} & self.retired
            require(not held, f"{slot.slot} holds version {held}, which is retired")
            if slot.requests or slot.incoming or slot.loading is not None or slot.paused:
                continue
            require(slot.idle is not None, f"{slot.slot} idles without a cause")
            self._check_idle(slot, snapshot)

    @staticmethod
    def _check_idle(slot: SlotView, snapshot: Snapshot) -> None:
        if snapshot.rollout_version is None or slot.leaving:
            return
        has_room = not slot.active
        waiting = slot.version in snapshot.waiting
        require(not (waiting and has_room), f"{slot.slot} idles while requests of its version wait")
        same = [other for other in snapshot.slots if other.slot.instance == slot.slot.instance]
        offers = any(snapshot.rollout_version in (other.version, other.loading) for other in same)
        require(
            offers or waiting, f"{slot.slot} is empty and its instance is not given version {snapshot.rollout_version}"
        )
        if slot.version == snapshot.rollout_version and has_room:
            require(not snapshot.admissible, f"{slot.slot} idles while groups are wanted")
            assert slot.idle is not None
            explained = slot.idle.reason is not IdleReason.STARTING
            require(explained, f"{slot.slot} serves version {slot.version} but idles as if it had none")

    def check_finished(self, snapshot: Snapshot, *, prompts: int) -> None:
        """Each prompt was trained once, failed or had no signal, slots are empty, and old versions are retired."""
        require(len(self.admitted) == prompts, f"{prompts - len(self.admitted)} prompts were never admitted")
        for group in range(len(self.admitted)):
            ends = (group in self.trained) + (group in self.failed) + (group in self.without_signal)
            require(ends == 1, f"C2: group {group} ended {ends} times")
        sizes = [len(batch) for batch in self.batches.values()]
        require(
            all(size == self._config.groups_per_step for size in sizes[:-1]),
            f"a step before the last trained fewer than {self._config.groups_per_step} groups",
        )
        require(not snapshot.untrained, "groups are left untrained")
        require(not snapshot.waiting, "requests are left waiting")
        for slot in snapshot.slots:
            require(not slot.requests and not slot.incoming, f"{slot.slot} still holds requests")
            require(not slot.active, f"{slot.slot} still counts active requests")
        held = {v for slot in snapshot.slots for v in (slot.version, slot.loading) if v is not None}
        held |= {v for v in (snapshot.newest, snapshot.rollout_version) if v is not None}
        left = self._published - self.retired - held
        require(not left, f"versions {sorted(left)} are neither held nor retired")
