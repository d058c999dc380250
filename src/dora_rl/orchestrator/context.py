"""What the components of the orchestrator share: the state, the clock of the current event, and the commands."""

from __future__ import annotations

from collections import deque

from dora_rl.core.commands import Command
from dora_rl.core.types import Fingerprint, Nanoseconds, Prompt, Version, nanoseconds
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.group_table import GroupTable
from dora_rl.orchestrator.instances import InstanceTable
from dora_rl.orchestrator.modes import AdmissionPolicy
from dora_rl.orchestrator.pacing import Pacing
from dora_rl.orchestrator.timers import Timers, Wait


class Context:
    """Shared state; one per orchestrator."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self.mode = config.mode_spec
        self.steps = config.steps
        """Steps that are asked for; None: as many as the prompts suffice for."""
        self.policy: AdmissionPolicy = self.mode.policy(config.groups_per_step, config.staleness)
        self.groups = GroupTable(
            config.group_size, config.min_survivors, config.dynamic_sampling * config.groups_per_step
        )
        self.instances = InstanceTable()
        self.timers = Timers()
        self.now: Nanoseconds = 0
        self.commands: list[Command] = []
        """Commands emitted for the current event."""
        self.newest: Version | None = None
        """The newest published version."""
        self.fingerprints: dict[Version, Fingerprint] = {}
        """Fingerprints of the weights, by version."""
        self.probes: dict[Version, str] = {}
        """Digests of the probes that versions were published with; empty where there is none."""
        self.prompts: deque[Prompt] = deque()
        """Prompts that are not admitted yet."""
        self.prompts_ended = False
        self.pacing = Pacing(config.groups_per_step)
        self.collect_seconds = 0.0
        """How long the trainer usually waits for a step's groups, smoothed."""
        self.progress_at: Nanoseconds = 0
        """When an event last brought progress, for the watchdog."""

    def emit(self, command: Command) -> None:
        self.commands.append(command)

    def set_timer(self, wait: Wait, seconds: float, *key: object) -> None:
        """Give a wait its deadline."""
        self.timers.set(self.now + nanoseconds(seconds), wait, *key)

    def open_batch(self) -> None:
        """Let the mode begin another batch, if it admits whole batches and the next one may begin now."""
        if self.newest is not None:
            self.policy.open_batch(self.newest, self.groups)

    def rollout_version(self) -> Version | None:
        """The version that new groups get."""
        return None if self.newest is None else self.policy.version(self.newest)

    def allowance(self) -> int:
        """How many groups the rules would admit now, whether or not there are prompts and room."""
        if self.newest is None:
            return 0
        allowed = self.policy.allowance(self.groups)
        if self.steps is not None:
            allowed = min(allowed, self.steps * self.config.groups_per_step - self.groups.kept)
        return max(0, allowed)

    @property
    def just_in_time(self) -> bool:
        """No more groups are admitted than keep the trainer from waiting.

        Not where instances share the trainer's devices, since there it waits by design. With K = 0 it changes nothing:
        the bound allows a step of groups, and that many are always wanted.
        """
        configured = self.config.admission == "just_in_time" and self.mode.serves_several_versions
        return configured and not self.instances.sharing

    @property
    def streams(self) -> bool:
        """Finished groups go to the trainer before their step is complete.

        Not with K = 0, which is synchronous training, also in the order of its sums.
        """
        return self.config.stream and self.mode.streams and self.policy.staleness > 0

    def wanted(self) -> int:
        """How many of the groups that the rules would admit the trainer wants to be begun now."""
        allowed = self.allowance()
        if not allowed or not self.just_in_time:
            return allowed
        return max(0, min(allowed, self.pacing.wanted(self.now) - self.groups.live))

    def admissible(self) -> int:
        """How many groups would be admitted now if there were room."""
        return min(self.wanted(), len(self.prompts))

    @property
    def drained(self) -> bool:
        """No further group will ever be admitted."""
        if self.prompts_ended and not self.prompts:
            return True
        if self.steps is None:
            return False
        return self.groups.trained >= self.steps * self.config.groups_per_step

    def check(self) -> None:
        """Assert the invariants of the shared state."""
        self.groups.check()
        self.instances.check()
        self.timers.check(self.now)
        self.pacing.check(self.now)
        # Whatever is admitted, the table's trajectories and the slots' requests are the same ones.
        on_slots = moving = 0
        for slot in self.instances.slots():
            on_slots += len(slot.requests)
            moving += len(slot.incoming)
        running = 0
        for group in self.groups.by_id.values():
            for trajectory in group.trajectories:
                running += trajectory.slot is not None
                moving -= trajectory.target is not None
        assert on_slots == running, f"{on_slots} requests are on slots, {running} trajectories have one"
        assert not moving, "the reservations of slots and the moves of trajectories do not agree"
        self._check_steps()

    def _check_steps(self) -> None:
        """Feasibility before step n: for every d >= n, at most (d - n + 1) * B untrained groups are due by step d."""
        if self.newest is None:
            assert not self.groups.admitted, "a group was admitted before a version was published"
            return
        due = 0
        for deadline in sorted(self.groups.due):
            due += self.groups.due[deadline]
            fits = (deadline - self.newest + 1) * self.config.groups_per_step
            assert due <= fits, f"{due} groups are due by step {deadline}, {fits} can be trained by then"
        assert all(version <= self.newest for version in self.groups.untrained), "a group has a future version"
