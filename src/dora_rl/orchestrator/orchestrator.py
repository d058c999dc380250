"""The orchestrator: `step(event, now) -> commands`. Every decision of the system is taken here and in its policies.

It has no clock, no I/O and no randomness: the same events at the same times give the same commands, in production,
in simulation and in a replay.

    event -> take notice (ledger, fleet, training) -> upkeep -> commands

Upkeep brings the whole to rest after each event, in this order: the trainer takes finished groups; a change of the
rollout version is noticed; slots that became empty get a version; waiting requests get room; new groups get the
room that is left; draining versions give up slots; versions that nothing holds are retired; what idles is explained.
Each part of it looks only at what the event touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_rl.core import events as e
from dora_rl.core.commands import Command, EvictInstance, Stalled
from dora_rl.core.errors import ConfigError, IntegrityError
from dora_rl.core.types import SECOND, InstanceId, InstanceSpec, Nanoseconds, SlotId, Version
from dora_rl.orchestrator.admission import Admission
from dora_rl.orchestrator.config import MOST_STALENESS, ControlConfig
from dora_rl.orchestrator.context import Context
from dora_rl.orchestrator.idle_causes import IdleExplainer
from dora_rl.orchestrator.instances import InstanceState, SlotState
from dora_rl.orchestrator.modes import MODES
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.slot_assignment import MOST_LOAD_FAILURES, SlotAssignment
from dora_rl.orchestrator.snapshot import SlotView, Snapshot
from dora_rl.orchestrator.timers import Timer, Wait
from dora_rl.orchestrator.trainer_state import TrainerStage, TrainerState

_MAY_REST = frozenset({e.Scored, e.Progress, e.Accumulated})
"""Events that may leave nothing to decide."""


class Orchestrator:
    """One run's decisions."""

    def __init__(self, config: ControlConfig) -> None:
        self.config = config
        self._context = Context(config)
        self._training = TrainerState(self._context)
        self._rollout = RequestScheduler(self._context, self._training)
        self._admission = Admission(self._context, self._rollout)
        self._partition = SlotAssignment(self._context, self._rollout, self._training)
        self._explainer = IdleExplainer(self._context, self._training)
        self._rebalance = False
        self._started = False
        self._former: set[InstanceId] = set()
        """Instances that are lost."""
        # A handler returns True if something moved, for the watchdog.
        self._handlers: dict[type[e.Event], Callable[[Any], bool]] = {
            e.PromptsArrived: self._on_prompts,
            e.InstanceJoined: self._on_joined,
            e.InstanceLost: self._on_lost,
            e.SlotLoaded: self._partition.loaded,
            e.SlotLoadFailed: self._on_load_failed,
            e.Progress: self._rollout.progress,
            e.KvPressure: self._on_pressure,
            e.Generated: self._rollout.generated,
            e.Parked: lambda event: self._rollout.parked(event.trajectory, event.attempt, event.kv_tokens, parked=True),
            e.Unparked: lambda event: self._rollout.parked(
                event.trajectory, event.attempt, event.kv_tokens, parked=False
            ),
            e.Scored: lambda event: self._rollout.scored(event.trajectory),
            e.TrajectoryFailed: lambda event: self._rollout.failed(event.trajectory, event.reason),
            e.Moved: self._rollout.moved,
            e.MoveFailed: self._rollout.move_failed,
            e.Accumulated: self._training.accumulated,
            e.Trained: self._on_trained,
            e.Published: self._on_published,
            e.Checkpointed: self._on_checkpointed,
            e.TrainerLost: self._on_trainer_lost,
            e.TrainerReady: self._on_trainer_ready,
            e.BoundChanged: self._on_bound_changed,
            e.Tick: lambda _: False,
        }

    def step(self, event: e.Event, now: Nanoseconds) -> list[Command]:
        """Take notice of an event and say what to do about it."""
        context = self._context
        assert now >= context.now, "time ran backwards"
        if isinstance(event, e.BoundChanged):
            self._check_bound(event.max_staleness)  # before anything is touched: a run survives a refusal
        context.now = now
        context.out = []
        if not self._started:
            self._started = True
            context.moved_at = now
            context.wait(Wait.REBALANCE, self.config.rebalance_seconds)
            context.wait(Wait.STALL, self.config.deadlines.stall)
            self._training.expect()
        rest = type(event) in _MAY_REST
        while (timer := context.timers.pop_due(now)) is not None:
            self._expire(timer)
            rest = False
        if self._handlers[type(event)](event):
            context.moved_at = now
        # Most rewards end no group, and most heartbeats free no room: then all is at rest already.
        if not rest or self._rollout.touched or self._rollout.group_ended:
            self._rollout.group_ended = False
            self._upkeep()
        return context.out

    def wake_at(self) -> Nanoseconds | None:
        """When a `Tick` is due; None once there is nothing left to do."""
        return None if self.finished else self._context.timers.next_due()

    @property
    def finished(self) -> bool:
        """Every prompt that will be admitted is trained or has a verdict."""
        context = self._context
        return context.newest is not None and context.drained and not context.ledger.live

    def snapshot(self) -> Snapshot:
        """The whole as it is now, for dashboards and tests."""
        context = self._context
        return Snapshot(
            newest=context.newest,
            rollout_version=context.rollout_version(),
            max_staleness=context.policy.staleness,
            admissible=context.admissible(),
            untrained=dict(context.ledger.untrained),
            waiting={version: len(queue) for version, queue in self._rollout.waiting.items()},
            trainer=self._training.stage.name.lower(),
            slots=tuple(
                SlotView(
                    slot=slot.id,
                    version=slot.version,
                    loading=slot.loading,
                    requests=len(slot.requests),
                    incoming=len(slot.incoming),
                    leaving=slot.leaving,
                    paused=instance.paused,
                    active=instance.active,
                    idle=slot.told,
                )
                for instance in context.fleet.instances.values()
                for slot in instance.slots
            ),
        )

    @property
    def newest(self) -> Version | None:
        """The newest published version."""
        return self._context.newest

    @property
    def requests_by_version(self) -> dict[Version, int]:
        """Requests on slots, by the version of their group."""
        return dict(self._rollout.requests)

    @property
    def failed_trajectories(self) -> dict[str, int]:
        """Verdicts, by reason."""
        return dict(self._context.ledger.failed_trajectories)

    # -- upkeep -----------------------------------------------------------------------------------------------

    def _upkeep(self) -> None:
        rollout, partition = self._rollout, self._partition
        if self._training.collect():
            self._pause(paused=True)
        self._context.open_batch()
        if partition.notice_rollout_version():
            self._admission.forget_room()
        # What is done for one slot can touch others, so look until all is at rest; explain at the end what was seen.
        seen: dict[SlotId, SlotState] = {}
        while True:
            touched, rollout.touched = rollout.touched, {}
            seen |= touched
            rollout.resume_waiting()
            for slot in touched.values():
                if not slot.instance.lost:
                    self._look_at(slot)
            partition.find_slots_for_waiting()
            if self._rebalance:
                self._rebalance = False
                partition.rebalance()
            if not rollout.touched:
                break
        self._admission.admit()
        partition.retire()
        seen |= rollout.touched
        rollout.touched = {}
        self._explainer.explain(seen)

    def _look_at(self, slot: SlotState) -> None:
        """The slot's load has changed: fill it if it is empty, offer its room, or see whether it can be spared."""
        self._partition.take_in_stranded(slot)  # before it is filled: else it would go to another version
        self._partition.fill(slot)
        self._offer_room(slot.instance)
        if slot.serving is not None and slot.version != self._context.rollout_version():
            self._partition.consolidate(slot.serving)

    def _offer_room(self, instance: InstanceState) -> None:
        """Room is shared by the slots of an instance: what one frees, another may use."""
        version = self._context.rollout_version()
        for slot in instance.slots:
            if slot.serving is not None and slot.version == version:
                self._admission.offer_room(slot)

    def _pause(self, *, paused: bool) -> None:
        """Instances on the trainer's devices stop while it computes."""
        if not self._context.fleet.sharing:
            return
        changed = [
            instance
            for instance in self._context.fleet.instances.values()
            if instance.spec.shares_trainer and instance.paused != paused
        ]
        for instance in changed:
            instance.paused = paused
            for slot in instance.slots:
                self._rollout.touch(slot)
            if not paused:
                self._partition.resumed(instance)
        if paused:
            self._partition.paused(changed)
        self._rebalance = self._rebalance or bool(changed)

    # -- instances --------------------------------------------------------------------------------------------

    def _on_joined(self, event: e.InstanceJoined) -> bool:
        spec = event.spec
        # A name is one life: a late or doubled report of one that is over can't bring it back.
        if spec.instance in self._context.fleet.instances or spec.instance in self._former:
            return False
        self._check(spec)
        instance = self._context.fleet.join(spec, self._context.now)
        instance.paused = spec.shares_trainer and self._training.stage is TrainerStage.TRAINING
        self._partition.joined(spec)
        self._await_progress(instance)
        for slot in instance.slots:
            self._rollout.touch(slot)
        self._rebalance = True
        return True

    def _check(self, spec: InstanceSpec) -> None:
        config = self.config
        if config.group_size > spec.max_requests:
            raise ConfigError(
                f"'group_size': a group of {config.group_size} does not fit instance {spec.instance}, "
                f"which takes {spec.max_requests} requests"
            )
        if config.max_response_tokens > spec.kv_tokens:
            raise ConfigError(
                f"'max_response_tokens': one trajectory of {config.max_response_tokens} tokens does not fit the KV "
                f"cache of instance {spec.instance}, which holds {spec.kv_tokens}"
            )

    def _on_lost(self, event: e.InstanceLost) -> bool:
        self._former.add(event.instance)
        instance = self._context.fleet.instances.get(event.instance)
        if instance is None:
            return False
        self._lose(instance)
        return True

    def _lose(self, instance: InstanceState) -> None:
        instance.lost = True
        self._former.add(instance.spec.instance)
        self._rollout.evict(instance)
        self._partition.forget(instance)
        for slot in instance.slots:
            self._explainer.forget(slot)
        self._context.fleet.leave(instance)
        self._rebalance = True

    def _evict(self, instance: InstanceState, reason: str) -> None:
        self._context.say(EvictInstance(instance=instance.spec.instance, reason=reason))
        self._lose(instance)

    def _on_load_failed(self, event: e.SlotLoadFailed) -> bool:
        slot = self._context.fleet.slot(event.slot)
        if slot is not None and self._partition.load_failed(slot, event.version):
            if event.differs:
                # Another life of the instance would compute the same, and what it says is not this version's.
                raise IntegrityError(f"{event.reason} (in {MOST_LOAD_FAILURES} loads in a row)")
            self._evict(slot.instance, f"loading failed repeatedly: {event.reason}")
        return False

    def _on_pressure(self, event: e.KvPressure) -> bool:
        instance = self._context.fleet.instances.get(event.instance)
        if instance is not None:
            instance.heard = self._context.now
            instance.kv_tokens = event.kv_tokens
            self._partition.relieve(instance)
        return False

    def _await_progress(self, instance: InstanceState) -> None:
        due = instance.heard + round(self.config.deadlines.progress * SECOND)
        self._context.timers.set(due, Wait.PROGRESS, instance)

    # -- prompts and trainer ----------------------------------------------------------------------------------

    def _on_prompts(self, event: e.PromptsArrived) -> bool:
        self._admission.prompts_arrived()
        self._context.prompts.extend(event.prompts)
        self._context.prompts_ended = self._context.prompts_ended or event.last
        return bool(event.prompts)

    def _on_trained(self, event: e.Trained) -> bool:
        before = self._training.stage
        self._training.trained(event)
        if before is TrainerStage.TRAINING and self._training.stage is not TrainerStage.TRAINING:
            self._pause(paused=False)
        return True

    def _on_published(self, event: e.Published) -> bool:
        if not self._training.published(event):
            return False
        self._partition.published(event.version)
        self._rebalance = True
        return True

    def _on_checkpointed(self, event: e.Checkpointed) -> bool:
        self._training.checkpointed(event.version)
        return False

    def _on_trainer_lost(self, event: e.TrainerLost) -> bool:
        self._training.lost(event.reason)
        self._pause(paused=False)
        return True

    def _on_trainer_ready(self, event: e.TrainerReady) -> bool:
        self._training.ready(event.version)
        self._pause(paused=self._training.stage is TrainerStage.TRAINING)
        return True

    def _check_bound(self, staleness: int) -> None:
        if not self._context.mode.bound_can_change:
            able = " or ".join(f"'{name}'" for name, mode in MODES.items() if mode.bound_can_change)
            raise ConfigError(
                f"'max_staleness': mode {self.config.mode} keeps its bound while it runs: only {able} can change it"
            )
        if not 0 <= staleness <= MOST_STALENESS:
            raise ConfigError(f"'max_staleness': {staleness} is not between 0 and {MOST_STALENESS}")

    def _on_bound_changed(self, event: e.BoundChanged) -> bool:
        self._context.policy.change_bound(event.max_staleness)
        return True

    # -- deadlines --------------------------------------------------------------------------------------------

    def _expire(self, timer: Timer) -> None:
        """The deadline of a wait has passed; most waits are long over by then."""
        key: Any = timer.key
        match timer.wait:
            case Wait.SCORE:
                self._rollout.overdue_score(*key)
            case Wait.TOOL:
                self._rollout.overdue_tool(*key)
            case Wait.MOVE:
                self._rollout.overdue_move(*key)
            case Wait.LOAD:
                slot_id, since = key
                slot = self._context.fleet.slot(slot_id)
                if slot is not None and self._partition.load_overdue(slot_id, since):
                    self._evict(slot.instance, f"loading version {slot.loading} took longer than deadlines.load")
            case Wait.PROGRESS:
                self._progress_due(key[0])
            case Wait.TRAIN:
                self._training.overdue(*key)
                if self._training.stage is TrainerStage.ABSENT:
                    self._pause(paused=False)
            case Wait.REBALANCE:
                self._rebalance = True
                self._context.wait(Wait.REBALANCE, self.config.rebalance_seconds)
            case Wait.STALL:
                self._watch()
            case Wait.ADMIT:
                self._admission.due()

    def _progress_due(self, instance: InstanceState) -> None:
        if instance.lost:
            return
        if self._context.now - instance.heard >= self.config.deadlines.progress * SECOND:
            self._evict(instance, "its requests have not moved on for longer than deadlines.progress")
        else:
            self._await_progress(instance)

    def _watch(self) -> None:
        """Should nothing move, say who waits for what."""
        quiet = self._context.now - self._context.moved_at
        if quiet >= self.config.deadlines.stall * SECOND and not self.finished:
            self._context.say(Stalled(waits=tuple(self._waits())))
        self._context.wait(Wait.STALL, self.config.deadlines.stall)

    def _waits(self) -> list[str]:
        context = self._context
        ledger = context.ledger
        waits = [f"trainer ({self._training.stage.name.lower()}) waits for {self._training.waits_for()}"]
        waits += [
            f"version {version}: {count} groups unfinished" for version, count in sorted(ledger.unfinished.items())
        ]
        waits += [
            f"version {version}: {len(queue)} requests wait for a slot"
            for version, queue in self._rollout.waiting.items()
        ]
        if not context.fleet.instances:
            waits.append("no instance has joined")
        return waits
