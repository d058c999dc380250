"""The orchestrator: `step(event, now) -> commands`. It and its policies take every decision of the system.

It has no clock, no I/O and no randomness: the same events at the same times give the same commands, in production,
in simulation and in a replay.

    event -> handler (updates groups, instances, trainer) -> upkeep -> commands

Upkeep brings the whole state to rest after each event, in this order: the trainer takes finished groups; the next batch
opens, if the mode admits whole batches; slots that became empty get a version; waiting requests get room; draining
versions give up slots; new groups get the room that is left; versions that nothing holds are retired; the causes of
idleness are reported. Each part looks only at what the event touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_rl.core import events as e
from dora_rl.core.commands import Command, EvictInstance, Stalled
from dora_rl.core.errors import ConfigError, IntegrityError
from dora_rl.core.types import SECOND, InstanceId, Nanoseconds, SlotId, Version
from dora_rl.orchestrator.admission import Admission
from dora_rl.orchestrator.config import MAX_STALENESS, ControlConfig
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.idle_causes import IdleExplainer
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.modes import MODES
from dora_rl.orchestrator.rebalance import Rebalancer
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.slot_assignment import MAX_LOAD_FAILURES, SlotAssignment
from dora_rl.orchestrator.snapshot import Snapshot, take_snapshot
from dora_rl.orchestrator.timers import Timer, Wait
from dora_rl.orchestrator.trainer_state import TrainerStage, TrainerState

_MAY_NEED_NO_UPKEEP = frozenset({e.Scored, e.Progress})
"""Events that may leave nothing to decide."""


class Orchestrator:
    """The decisions of one run."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self._context = Context(config)
        self._trainer = TrainerState(self._context)
        self._scheduler = RequestScheduler(self._context)
        self._admission = Admission(self._context, self._scheduler)
        self._assignment = SlotAssignment(self._context, self._scheduler)
        self._rebalancer = Rebalancer(self._context, self._scheduler, self._assignment, self._trainer)
        self._explainer = IdleExplainer(self._context, self._trainer)
        self._rebalance_due = False
        self._started = False
        self._lost_instances: set[InstanceId] = set()
        # A handler returns True if the event brought progress, for the watchdog.
        self._handlers: dict[type[e.Event], Callable[[Any], bool]] = {
            e.PromptsArrived: self._on_prompts,
            e.InstanceJoined: self._on_joined,
            e.InstanceLost: self._on_lost,
            e.SlotLoaded: self._on_loaded,
            e.SlotLoadFailed: self._on_load_failed,
            e.Progress: self._scheduler.progress,
            e.KvPressure: self._on_pressure,
            e.Generated: self._scheduler.generated,
            e.Parked: self._scheduler.parked,
            e.Unparked: self._scheduler.unparked,
            e.Scored: self._scheduler.scored,
            e.TrajectoryFailed: self._scheduler.trajectory_failed,
            e.Moved: self._scheduler.moved,
            e.MoveFailed: self._scheduler.move_failed,
            e.Accumulated: self._trainer.accumulated,
            e.Trained: self._on_trained,
            e.Published: self._on_published,
            e.Checkpointed: self._on_checkpointed,
            e.TrainerLost: self._on_trainer_lost,
            e.TrainerReady: self._on_trainer_ready,
            e.BoundChanged: self._on_bound_changed,
            e.StepsChanged: self._on_steps_changed,
            e.Tick: lambda _: False,
        }

    def step(self, event: e.Event, now: Nanoseconds) -> list[Command]:
        """Handle an event and return the commands that follow from it."""
        context = self._context
        assert now >= context.now, "time ran backwards"
        if isinstance(event, e.BoundChanged):
            self._check_bound(event.max_staleness)  # before anything is touched: a run survives a refusal
        elif isinstance(event, e.StepsChanged):
            self._check_steps(event.steps)
        context.now = now
        context.commands = []
        if not self._started:
            self._started = True
            context.progress_at = now
            context.set_timer(Wait.REBALANCE, self.config.rebalance_seconds)
            context.set_timer(Wait.STALL, self.config.deadlines.stall)
            self._trainer.expect()
        at_rest = type(event) in _MAY_NEED_NO_UPKEEP
        while (timer := context.timers.pop_due(now)) is not None:
            self._expire(timer)
            at_rest = False
        if self._handlers[type(event)](event):
            context.progress_at = now
        # Most rewards end no group, and most progress reports free no room: then everything is at rest already.
        if not at_rest or self._scheduler.touched or self._scheduler.group_ended:
            self._scheduler.group_ended = False
            self._upkeep()
        return context.commands

    def wake_at(self) -> Nanoseconds | None:
        """When a `Tick` is due; None once there is nothing left to do."""
        return None if self.finished else self._context.timers.next_due()

    @property
    def prompts_used_up(self) -> bool:
        """All prompts that there are have been admitted, so that more steps would find none."""
        return self._context.prompts_ended and not self._context.prompts

    @property
    def finished(self) -> bool:
        """Every prompt that will be admitted is trained, has failed or had no signal."""
        context = self._context
        return context.newest is not None and context.drained and not context.groups.live

    def snapshot(self) -> Snapshot:
        """The current state, for dashboards and tests."""
        return take_snapshot(self._context, self._scheduler, self._trainer)

    @property
    def newest(self) -> Version | None:
        """The newest published version."""
        return self._context.newest

    @property
    def requests_by_version(self) -> dict[Version, int]:
        """Number of requests on slots, by the version of their group."""
        return dict(self._scheduler.requests)

    @property
    def failed_trajectories(self) -> dict[str, int]:
        """Number of failed trajectories, by reason."""
        return dict(self._context.groups.failed_trajectories)

    def check(self) -> None:
        """Assert all invariants of the state between two events. It costs time, so only tests call it."""
        self._context.check()
        self._scheduler.check()
        self._assignment.check()
        self._admission.check()
        self._trainer.check()
        self._explainer.check()
        assert not self._rebalance_due, "a rebalance is due and did not happen"
        still_there = self._lost_instances & self._context.instances.by_id.keys()
        assert not still_there, f"lost instances {still_there} are still there"
        training = self._trainer.stage is TrainerStage.TRAINING
        for instance in self._context.instances.by_id.values():
            pauses = instance.spec.shares_trainer and training
            assert instance.paused == pauses, (
                f"{instance} is {'not ' * pauses}paused; the trainer: {self._trainer.stage}"
            )

    # -- upkeep -----------------------------------------------------------------------------------------------

    def _upkeep(self) -> None:
        scheduler, assignment = self._scheduler, self._assignment
        if self._trainer.collect():
            self._set_paused(paused=True)
        self._context.open_batch()
        if assignment.update_rollout_version():
            self._admission.clear_room()
        # Work on one slot can touch others, so repeat until none is touched; explain all of them at the end.
        seen: dict[SlotId, SlotState] = {}
        while True:
            touched, scheduler.touched = scheduler.touched, {}
            seen |= touched
            scheduler.resume_waiting()
            for slot in touched.values():
                if not slot.instance.lost:
                    self._update_slot(slot)
            assignment.find_slots_for_waiting()
            if self._rebalance_due:
                self._rebalance_due = False
                self._rebalancer.rebalance()
            if not scheduler.touched:
                break
        self._admission.admit()
        for version in assignment.retire():
            self._rebalancer.version_retired(version)
        seen |= scheduler.touched
        scheduler.touched = {}
        self._explainer.explain(seen)

    def _update_slot(self, slot: SlotState) -> None:
        """The slot's load has changed: fill it if it is empty, offer its room, and see whether it can be given up."""
        self._rebalancer.take_in_stranded(slot)  # before it is filled: else it would go to another version
        self._assignment.fill(slot)
        version = self._context.rollout_version()
        for sibling in slot.instance.slots:  # they share the instance's room: what one frees, another may use
            if sibling.serving is not None and sibling.version == version:
                self._admission.offer_room(sibling)
        if slot.serving is not None and slot.version != version:
            self._rebalancer.consolidate(slot.serving)

    def _set_paused(self, *, paused: bool) -> None:
        """Instances on the trainer's devices pause while it computes."""
        if not self._context.instances.sharing:
            return
        changed = [
            instance
            for instance in self._context.instances.by_id.values()
            if instance.spec.shares_trainer and instance.paused != paused
        ]
        if not changed:
            return
        for instance in changed:
            instance.paused = paused
            for slot in instance.slots:
                self._scheduler.touch(slot)
            if not paused:
                self._assignment.instance_resumed(instance)
        if paused:
            self._rebalancer.instances_paused(changed)
        else:
            self._rebalancer.instances_resumed()
        self._rebalance_due = True

    # -- instances --------------------------------------------------------------------------------------------

    def _on_joined(self, event: e.InstanceJoined) -> bool:
        spec = event.spec
        # An id is used once: a late or duplicate report of a lost instance can't bring it back.
        if spec.instance in self._context.instances.by_id or spec.instance in self._lost_instances:
            return False
        self.config.check_fits(spec)
        instance = self._context.instances.add(spec, self._context.now)
        instance.paused = spec.shares_trainer and self._trainer.stage is TrainerStage.TRAINING
        self._rebalancer.instance_joined(spec)
        self._set_progress_timer(instance)
        for slot in instance.slots:
            self._scheduler.touch(slot)
        self._rebalance_due = True
        return True

    def _on_lost(self, event: e.InstanceLost) -> bool:
        self._lost_instances.add(event.instance)
        instance = self._context.instances.by_id.get(event.instance)
        if instance is None:
            return False
        self._remove(instance)
        return True

    def _remove(self, instance: InstanceState) -> None:
        instance.lost = True
        self._lost_instances.add(instance.spec.instance)
        self._scheduler.instance_lost(instance)
        self._assignment.instance_lost(instance)
        for slot in instance.slots:
            self._explainer.forget(slot)
        self._context.instances.remove(instance)
        self._rebalance_due = True

    def _evict(self, instance: InstanceState, reason: str) -> None:
        self._context.emit(EvictInstance(instance=instance.spec.instance, reason=reason))
        self._remove(instance)

    def _on_loaded(self, event: e.SlotLoaded) -> bool:
        slot = self._assignment.loaded(event)
        if slot is None:
            return False
        self._rebalancer.slot_loaded(slot)
        return True

    def _on_load_failed(self, event: e.SlotLoadFailed) -> bool:
        slot = self._context.instances.slot(event.slot)
        if slot is not None and self._assignment.load_failed(slot, event.version):
            if event.differs:
                # A restarted instance would compute the same, and its tokens would not be this version's.
                raise IntegrityError(f"{event.reason} (in {MAX_LOAD_FAILURES} loads in a row)")
            self._evict(slot.instance, f"loading failed repeatedly: {event.reason}")
        return False

    def _on_pressure(self, event: e.KvPressure) -> bool:
        instance = self._context.instances.by_id.get(event.instance)
        if instance is not None:
            instance.progress_at = self._context.now
            instance.kv_tokens = event.kv_tokens
            self._rebalancer.relieve(instance)
        return False

    def _set_progress_timer(self, instance: InstanceState) -> None:
        due = instance.progress_at + round(self.config.deadlines.progress * SECOND)
        self._context.timers.set(due, Wait.PROGRESS, instance)

    # -- prompts and trainer ----------------------------------------------------------------------------------

    def _on_prompts(self, event: e.PromptsArrived) -> bool:
        self._admission.prompts_arrived()
        self._context.prompts.extend(event.prompts)
        self._context.prompts_ended = self._context.prompts_ended or event.last
        return bool(event.prompts)

    def _on_trained(self, event: e.Trained) -> bool:
        before = self._trainer.stage
        self._trainer.trained(event)
        if before is TrainerStage.TRAINING and self._trainer.stage is not TrainerStage.TRAINING:
            self._set_paused(paused=False)
        return True

    def _on_published(self, event: e.Published) -> bool:
        if not self._trainer.published(event):
            return False
        self._assignment.published(event.version)
        self._rebalance_due = True
        return True

    def _on_checkpointed(self, event: e.Checkpointed) -> bool:
        self._trainer.checkpointed(event.version)
        return False

    def _on_trainer_lost(self, event: e.TrainerLost) -> bool:
        self._trainer.lost(event.reason)
        self._set_paused(paused=False)
        return True

    def _on_trainer_ready(self, event: e.TrainerReady) -> bool:
        self._trainer.ready(event.version)
        self._set_paused(paused=self._trainer.stage is TrainerStage.TRAINING)
        return True

    def _check_bound(self, staleness: int) -> None:
        if not self._context.mode.bound_can_change:
            able = " or ".join(f"'{name}'" for name, mode in MODES.items() if mode.bound_can_change)
            raise ConfigError(
                f"'max_staleness': mode {self.config.mode} keeps its bound while it runs: only {able} can change it"
            )
        if not 0 <= staleness <= MAX_STALENESS:
            raise ConfigError(f"'max_staleness': {staleness} is not between 0 and {MAX_STALENESS}")

    def _on_bound_changed(self, event: e.BoundChanged) -> bool:
        self._context.policy.change_bound(event.max_staleness)
        return True

    def _check_steps(self, steps: int) -> None:
        before = self._context.steps
        if before is None or steps < before:
            asked = "all that its prompts suffice for" if before is None else before
            raise ConfigError(f"'steps': {steps} is fewer than the run was asked for before ({asked})")

    def _on_steps_changed(self, event: e.StepsChanged) -> bool:
        """Groups that are admitted already stay as they are, so what is trained so far is the same."""
        self._context.steps = event.steps
        return True

    # -- deadlines --------------------------------------------------------------------------------------------

    def _expire(self, timer: Timer) -> None:
        """The deadline of a wait has passed; most waits ended long before it."""
        key: Any = timer.key
        match timer.wait:
            case Wait.SCORE:
                self._scheduler.score_overdue(*key)
            case Wait.TOOL:
                self._scheduler.tool_overdue(*key)
            case Wait.MOVE:
                self._scheduler.move_overdue(*key)
            case Wait.LOAD:
                slot_id, since = key
                slot = self._context.instances.slot(slot_id)
                if slot is not None and self._assignment.load_overdue(slot_id, since):
                    self._evict(slot.instance, f"loading version {slot.loading} took longer than deadlines.load")
            case Wait.PROGRESS:
                self._progress_due(key[0])
            case Wait.TRAIN:
                self._trainer.overdue(*key)
                if self._trainer.stage is TrainerStage.ABSENT:
                    self._set_paused(paused=False)
            case Wait.REBALANCE:
                self._rebalance_due = True
                self._context.set_timer(Wait.REBALANCE, self.config.rebalance_seconds)
            case Wait.STALL:
                self._check_for_stall()
            case Wait.ADMIT:
                self._admission.retry_due()

    def _progress_due(self, instance: InstanceState) -> None:
        if instance.lost:
            return
        if self._context.now - instance.progress_at >= self.config.deadlines.progress * SECOND:
            self._evict(instance, "its requests have not moved on for longer than deadlines.progress")
        else:
            self._set_progress_timer(instance)

    def _check_for_stall(self) -> None:
        """Report who waits for what if nothing has made progress for longer than `deadlines.stall`."""
        quiet = self._context.now - self._context.progress_at
        if quiet >= self.config.deadlines.stall * SECOND and not self.finished:
            self._context.emit(Stalled(waits=tuple(self._describe_waits())))
        self._context.set_timer(Wait.STALL, self.config.deadlines.stall)

    def _describe_waits(self) -> list[str]:
        context = self._context
        waits = [f"trainer ({self._trainer.stage.name.lower()}) waits for {self._trainer.waits_for()}"]
        waits += [
            f"version {version}: {count} groups unfinished"
            for version, count in sorted(context.groups.unfinished.items())
        ]
        waits += [
            f"version {version}: {len(queue)} requests wait for a slot"
            for version, queue in self._scheduler.waiting.items()
        ]
        if not context.instances.by_id:
            waits.append("no instance has joined")
        return waits
