"""Measures each step for the adaptive bound, from the events and commands of a run, and says when the bound changes.

A runtime shows it every event with the commands that answered it, and reports `BoundChanged` when it gets a new bound.
The event is logged, so a replay has the same bounds whatever was measured. Statistics are not: after a restart the
controller starts with the bound in force and measures anew.

Invariants:
- the trainer waits exactly if it has no groups to accumulate, no step to apply and none to publish, and the
  orchestrator names a cause that rollout is responsible for;
- the tokens of a trajectory count once, in the step that trains its group.
"""

from __future__ import annotations

from collections.abc import Sequence

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import IdleReason
from dora_rl.core.types import SECOND, Nanoseconds, StepId, TrajectoryId
from dora_rl.orchestrator.adaptive_bound import AdaptiveBound, StepMeasures
from dora_rl.orchestrator.config import ControlConfig

_WAITS = (IdleReason.ROLLOUT, IdleReason.DEADLINE, IdleReason.REWARD)
"""Causes that more groups in flight may help against."""
_INTERRUPTIONS = (e.TrainerLost, e.InstanceLost, e.InstanceJoined)
"""Events after which steps take another time, whatever the bound is."""


class BoundControl:
    """Drives the adaptive bound of one run."""

    def __init__(self, config: ControlConfig, bound: int) -> None:
        """`bound` is the one in force."""
        self._adaptive = AdaptiveBound(bound, config.largest_staleness)
        self._size = config.group_size
        self._lengths: dict[TrajectoryId, int] = {}
        """Response tokens of each generated trajectory that is not trained yet."""
        self._tokens: dict[StepId, int] = {}
        """Response tokens of the steps since the last version."""
        self._learning: dict[StepId, tuple[float | None, float | None]] = {}
        """Effective sample size and KL divergence of steps that are not published yet."""
        self._accumulating = 0
        self._applying = False
        self._cause = IdleReason.STARTING
        self._at: Nanoseconds = 0
        self._began: Nanoseconds | None = None
        """When the version before was published; None until one is seen."""
        self._waited: Nanoseconds = 0

    def learned(self, step: StepId, ess: float | None, kl: float | None) -> None:
        """Take in what the trainer measured of a step that it is about to publish."""
        self._learning[step] = (ess, kl)

    def apply(self, event: e.Event, commands: Sequence[c.Command], at: Nanoseconds) -> int | None:
        """Take in an event with the commands that answered it; return the new bound if it changes."""
        self._account(at)
        if isinstance(event, _INTERRUPTIONS):
            self._adaptive.interrupt()
        match event:
            case e.Generated(trajectory=trajectory, tokens=tokens):
                self._lengths[trajectory] = tokens
            case e.Accumulated(groups=groups):
                self._accumulating = max(0, self._accumulating - groups)
            case e.Trained():
                # A step that is trained again after a restart is not published again.
                self._applying = any(isinstance(command, c.Publish) for command in commands)
            case e.TrainerLost():
                self._accumulating, self._applying = 0, False
            case _:
                pass
        changed = self._end_step(event.version, at) if isinstance(event, e.Published) else None
        for command in commands:
            self._apply_command(command)
        return changed

    def _apply_command(self, command: c.Command) -> None:
        match command:
            case c.Accumulate(groups=groups):
                self._accumulating += len(groups)
            case c.Apply(step=step, groups=groups):
                self._applying = True
                tokens = sum(self._take_lengths(group) for group in groups)
                self._tokens.setdefault(step, tokens)
            case c.GroupFailed(group=group) | c.GroupWithoutSignal(group=group):
                self._take_lengths(group)
            case c.TrainerIdles(cause=cause):
                self._cause = cause.reason
            case _:
                pass

    def _take_lengths(self, group: int) -> int:
        first = group * self._size
        return sum(self._lengths.pop(trajectory, 0) for trajectory in range(first, first + self._size))

    def _account(self, at: Nanoseconds) -> None:
        """Add the time since the last event to the waiting time if the trainer waited."""
        if not self._accumulating and not self._applying and self._cause in _WAITS:
            self._waited += at - self._at
        self._at = at

    def _end_step(self, version: int, at: Nanoseconds) -> int | None:
        ess, kl = self._learning.pop(version - 1, (None, None))
        began, self._began = self._began, at
        waited, self._waited = self._waited, 0
        tokens = self._tokens.pop(version - 1, 0)
        self._tokens.clear()
        self._learning.clear()
        self._applying = False
        if began is None:
            return None
        measures = StepMeasures(seconds=(at - began) / SECOND, waited=waited / SECOND, tokens=tokens, ess=ess, kl=kl)
        return self._adaptive.observe(measures)
