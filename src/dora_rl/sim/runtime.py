"""The simulated runtime: it executes the orchestrator's commands on a virtual clock, with models of all components.

It is deterministic: entries of the clock that are due at the same time run in the order in which they were made.

    clock:  (time, number, action)  ->  action() may append to `_events`  ->  orchestrator
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import (
    GroupId,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    Prompt,
    SlotId,
    StepId,
    TrajectoryId,
    Version,
    nanoseconds,
)
from dora_rl.orchestrator.bound_control import BoundControl
from dora_rl.orchestrator.modes import LayoutKind
from dora_rl.sim.config import SimConfig
from dora_rl.sim.costs import Costs
from dora_rl.sim.instance import SimInstance, SimRequest
from dora_rl.sim.step_records import StepRecords
from dora_rl.sim.workload import Source

Action = Callable[[], None]
_STARTING = IdleCause(reason=IdleReason.STARTING)


def fingerprint(version: Version) -> str:
    return f"v{version}"


class SimRuntime:
    """Executes commands on the virtual clock."""

    def __init__(self, config: SimConfig, layout: LayoutKind, *, keep_segments: bool = False) -> None:
        self.config = config
        self.costs = Costs(config)
        self.source = Source(
            config.workload, config.control.group_size, config.control.max_response_tokens, config.seed
        )
        self.now: Nanoseconds = 0
        self.records = StepRecords(config.control.group_size)
        self.moves: list[tuple[Nanoseconds, SlotId, SlotId, int]] = []
        """Time, source, target and number of requests of each move."""
        self.tokens_moved = 0
        self.events = 0
        self._clock: list[tuple[Nanoseconds, int, Action]] = []
        self._number = 0
        self._events: deque[e.Event] = deque()
        self._dirty: dict[InstanceId, SimInstance] = {}
        """Instances whose wake-up and labels must be updated."""
        self._instance_of: dict[TrajectoryId, SimInstance] = {}
        """The instance of each request that is not being moved."""
        self._requests: dict[TrajectoryId, SimRequest] = {}
        """All unfinished requests."""
        self._prompts = 0
        """How many prompts have been fetched."""
        self._last_step = config.warmup_steps + config.steps
        self.bounds: list[tuple[Version, int]] = [(0, config.control.staleness)]
        """The staleness bounds, each with the newest version when it came into force."""
        self._bound_control = (
            BoundControl(config.control, config.control.staleness) if config.control.adaptive else None
        )
        self._current: e.Event = e.Tick()
        """The event that the next commands answer."""

        self.trainer_devices, sharing, dedicated = config.divide(layout)
        self.trainer = TimeAccount(0, Activity(ActivityLabel.IDLE, None, _STARTING), keep_segments=keep_segments)
        self._trainer_cause = _STARTING
        self._trainer_free: Nanoseconds = 0
        """When the trainer has finished what it was given."""
        self._trainer_step: StepId = 0
        self.instances: dict[InstanceId, SimInstance] = {}
        for number in range(sharing + dedicated):
            self._add_instance(number, shares_trainer=number < sharing, keep_segments=keep_segments)
        self._events.append(e.TrainerReady(version=0))
        self._at(nanoseconds(config.control.rebalance_seconds / 2), self._heartbeat)

    # -- the `Runtime` interface ------------------------------------------------------------------------------

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[e.Event, Nanoseconds] | None:
        """Run the clock until there is an event; None when all steps are done."""
        if self._last_step in self.records.live_versions:
            return None
        while not self._events:
            if wake_at is not None and (not self._clock or wake_at < self._clock[0][0]):
                self.now = max(self.now, wake_at)
                self._events.append(e.Tick())
                break
            assert self._clock, "no event can ever happen again"
            self.now, _, action = heapq.heappop(self._clock)
            action()
            self._schedule_dirty()
        self.events += 1
        self._current = self._events.popleft()
        return self._current, self.now

    def execute(self, commands: Iterable[c.Command]) -> None:
        answered = list(commands)
        if self._bound_control is not None:
            bound = self._bound_control.apply(self._current, answered, self.now)
            if bound is not None:
                self.bounds.append((max(self.records.live_versions), bound))
                self._events.append(e.BoundChanged(max_staleness=bound))
        for command in answered:
            handler = self._handlers.get(type(command))
            if handler is not None:
                handler(self, command)
        self._schedule_dirty()

    def close(self) -> None:
        """Settle all time accounts at the current time."""
        self.trainer.settle(self.now)
        for instance in self.instances.values():
            for slot in instance.slot_list:
                slot.account.settle(self.now)

    # -- clock ------------------------------------------------------------------------------------------------

    def _at(self, time: Nanoseconds, action: Action) -> None:
        self._number += 1
        heapq.heappush(self._clock, (time, self._number, action))

    def _after(self, seconds: float, action: Action) -> None:
        self._at(self.now + nanoseconds(seconds), action)

    def _touch(self, instance: SimInstance) -> None:
        """Call before changing an instance: decode up to now, and update its wake-up and labels after the change."""
        instance.advance(self.now)
        self._dirty[instance.spec.instance] = instance

    def _schedule_dirty(self) -> None:
        for instance in self._dirty.values():
            instance.generation += 1
            instance.relabel(self.now)
            wake = instance.next_wake()
            if wake is not None:
                self._at(wake, partial(self._wake, instance, instance.generation))
        self._dirty.clear()

    # -- instances --------------------------------------------------------------------------------------------

    def _add_instance(self, number: int, *, shares_trainer: bool, keep_segments: bool) -> None:
        rollout = self.config.rollout
        spec = InstanceSpec(
            instance=f"i{number}",
            slots=rollout.slots,
            max_requests=rollout.max_requests,
            kv_tokens=self.costs.kv_tokens,
            shares_trainer=shares_trainer,
            decode=self.costs.decode(),
        )
        self.instances[spec.instance] = SimInstance(spec, self.costs, self.now, keep_segments=keep_segments)
        self._events.append(e.InstanceJoined(spec=spec))

    def _wake(self, instance: SimInstance, generation: int) -> None:
        if generation != instance.generation:
            return
        swaps = instance.swaps
        done = instance.wake(self.now)
        self._touch(instance)
        for request in done:
            self._end_turn(instance, request)
        if done:
            instance.swap_in(self.now)
        if instance.swaps > swaps:
            self._events.append(e.KvPressure(instance=instance.spec.instance, kv_tokens=instance.kv_tokens))

    def _end_turn(self, instance: SimInstance, request: SimRequest) -> None:
        trajectory = request.trajectory
        turn = request.turns[request.turn]
        if request.turn + 1 < len(request.turns):
            request.parked = True
            self._after(turn.tool_seconds, partial(self._end_tool, request))
            self._events.append(e.Parked(trajectory=trajectory, attempt=request.attempt, kv_tokens=instance.kv_tokens))
            return
        version = instance.slot_list[request.slot].version
        assert version is not None
        del instance.requests[trajectory]
        del self._instance_of[trajectory]
        del self._requests[trajectory]
        tokens = sum(turn.tokens for turn in request.turns)
        self.records.generated(self._group(trajectory), tokens)
        self._events.append(
            e.Generated(
                trajectory=trajectory,
                attempt=request.attempt,
                instance=instance.spec.instance,
                version=version,
                fingerprint=fingerprint(version),
                tokens=tokens,
                kv_tokens=instance.kv_tokens,
            )
        )

    def _end_tool(self, request: SimRequest) -> None:
        """The tool has returned: KV comes back from host memory, the tool's tokens are prefilled, decoding goes on."""
        turn = request.turns[request.turn]
        instance = self._instance_of.get(request.trajectory)
        if instance is None:  # it is being moved; it continues when it has arrived
            self._after(1.0, partial(self._end_tool, request))
            return
        self._touch(instance)
        request.parked = False
        request.turn += 1
        request.remaining = request.turns[request.turn].tokens
        instance.stall(self.now, ActivityLabel.PREFILL, self.costs.swap(int(request.context)))
        instance.stall(self.now, ActivityLabel.PREFILL, self.costs.prefill(turn.tool_tokens))
        request.context += turn.tool_tokens
        instance.join(request)
        self._events.append(
            e.Unparked(trajectory=request.trajectory, attempt=request.attempt, kv_tokens=instance.kv_tokens)
        )

    def _heartbeat(self) -> None:
        """Every instance reports its progress."""
        for name, instance in self.instances.items():
            tokens = instance.tokens(self.now)
            self._dirty[name] = instance
            self._events.append(e.Progress(instance=name, kv_tokens=instance.kv_tokens, tokens=tokens))
        self._after(self.config.control.rebalance_seconds, self._heartbeat)

    # -- commands to instances --------------------------------------------------------------------------------

    def _load(self, command: c.LoadVersion) -> None:
        instance = self.instances[command.slot.instance]
        self._touch(instance)
        slot = instance.slot_list[command.slot.number]
        seconds = self.costs.load()
        if command.in_flight:
            instance.stall(self.now, ActivityLabel.LOAD, seconds)
            instance.stall(self.now, ActivityLabel.REPREFILL, self.costs.prefill(instance.kv_tokens))
        else:
            slot.loading = True
        self._after(seconds, partial(self._loaded, instance, command))

    def _loaded(self, instance: SimInstance, command: c.LoadVersion) -> None:
        self._touch(instance)
        slot = instance.slot_list[command.slot.number]
        slot.loading = False
        slot.version = command.version
        slot.cause = _STARTING
        self._events.append(
            e.SlotLoaded(slot=command.slot, version=command.version, fingerprint=fingerprint(command.version))
        )

    def _unload(self, command: c.UnloadSlot) -> None:
        self.instances[command.slot.instance].slot_list[command.slot.number].version = None

    def _start(self, command: c.StartGroup) -> None:
        instance = self.instances[command.slot.instance]
        self._touch(instance)
        size = self.config.control.group_size
        group = command.group
        self.records.admitted(group, command.version, self.now)
        # The siblings share the KV of their prompt, which is computed once.
        instance.stall(self.now, ActivityLabel.PREFILL, self.costs.prefill(command.prompt.tokens))
        for sibling in range(size):
            turns = self.source.turns(group, sibling)
            request = SimRequest(
                trajectory=group * size + sibling,
                attempt=0,
                turns=turns,
                context=command.prompt.tokens,
                remaining=turns[0].tokens,
                slot=command.slot.number,
            )
            self._add_request(instance, request)

    def _resume(self, command: c.Resume) -> None:
        instance = self.instances[command.slot.instance]
        request = self._requests[command.trajectory]
        self._touch(instance)
        request.attempt = command.attempt
        request.slot = command.slot.number
        instance.stall(self.now, ActivityLabel.REPREFILL, self.costs.prefill(int(request.context)))
        self._add_request(instance, request)

    def _add_request(self, instance: SimInstance, request: SimRequest) -> None:
        instance.requests[request.trajectory] = request
        self._instance_of[request.trajectory] = instance
        self._requests[request.trajectory] = request
        if not request.parked:
            instance.join(request)

    def _move(self, command: c.Move) -> None:
        """Requests leave with their KV and arrive when it has been sent over the link."""
        source = self.instances[command.source.instance]
        target = self.instances[command.target.instance]
        self._touch(source)
        leaving = [
            request for trajectory in command.trajectories if (request := source.requests.get(trajectory)) is not None
        ]
        if not leaving:
            return
        for request in leaving:
            source.remove(request)
            del self._instance_of[request.trajectory]
        tokens = int(sum(request.context for request in leaving))
        self.tokens_moved += tokens
        self.moves.append((self.now, command.source, command.target, len(leaving)))
        source.slot_list[command.source.number].transfers += 1
        target.slot_list[command.target.number].transfers += 1
        self._dirty[target.spec.instance] = target
        self._after(self.costs.move(tokens), partial(self._arrive, command, leaving))

    def _arrive(self, command: c.Move, requests: list[SimRequest]) -> None:
        source = self.instances[command.source.instance]
        target = self.instances[command.target.instance]
        self._touch(source)
        self._touch(target)
        source.slot_list[command.source.number].transfers -= 1
        target.slot_list[command.target.number].transfers -= 1
        for request in requests:
            request.slot = command.target.number
            self._add_request(target, request)
        self._events.append(
            e.Moved(
                trajectories=tuple(request.trajectory for request in requests),
                attempts=tuple(request.attempt for request in requests),
                source=command.source,
                target=command.target,
            )
        )

    def _abort(self, command: c.Abort) -> None:
        instance = self.instances[command.instance]
        request = instance.requests.get(command.trajectory)
        if request is not None and request.attempt == command.attempt:
            self._touch(instance)
            instance.remove(request)
            del self._instance_of[request.trajectory]

    def _slot_idles(self, command: c.SlotIdles) -> None:
        instance = self.instances[command.slot.instance]
        instance.slot_list[command.slot.number].cause = command.cause
        self._touch(instance)

    # -- data, rewards and trainer ----------------------------------------------------------------------------

    def _fetch(self, command: c.FetchPrompts) -> None:
        first = self._prompts
        self._prompts += command.count
        self._events.append(
            e.PromptsArrived(
                prompts=tuple(
                    Prompt(key=f"p{number}", tokens=self.source.prompt_tokens(number))
                    for number in range(first, self._prompts)
                )
            )
        )

    def _score(self, command: c.Score) -> None:
        reward = self.source.reward(*divmod(command.trajectory, self.config.control.group_size))
        event = e.Scored(trajectory=command.trajectory, reward=reward)
        seconds = self.config.workload.reward_seconds
        self.records.scored(self._group(command.trajectory), self.now + nanoseconds(seconds))
        if seconds:
            self._after(seconds, partial(self._events.append, event))
        else:
            self._events.append(event)

    def _without_signal(self, command: c.GroupWithoutSignal) -> None:
        self.records.ended_without_signal(command.group)

    def _accumulate(self, command: c.Accumulate) -> None:
        tokens = sum(self._group_tokens(group) for group in command.groups)
        seconds = self.costs.train(tokens, self.trainer_devices)
        self._trainer_free = max(self._trainer_free, self.now) + nanoseconds(seconds)
        self._trainer_step = command.step
        self.trainer.switch(self.now, Activity(ActivityLabel.TRAIN, command.step))
        free = self._trainer_free
        self._at(free, partial(self._accumulated, command, free))

    def _group(self, trajectory: TrajectoryId) -> GroupId:
        return trajectory // self.config.control.group_size

    def _group_tokens(self, group: GroupId) -> int:
        prompts = self.source.prompt_tokens(group) * self.config.control.group_size
        return prompts + self.records.response_tokens(group)

    def _accumulated(self, command: c.Accumulate, free: Nanoseconds) -> None:
        self._events.append(e.Accumulated(step=command.step, attempt=command.attempt, groups=len(command.groups)))
        if free == self._trainer_free and self.trainer.current.label is ActivityLabel.TRAIN:
            self.trainer.switch(self.now, Activity(ActivityLabel.IDLE, self._trainer_step, self._trainer_cause))

    def _apply(self, command: c.Apply) -> None:
        self.records.applied(command.step, command.groups)
        self._trainer_free = max(self._trainer_free, self.now) + nanoseconds(self.config.trainer.fixed_seconds)
        self.trainer.switch(self.now, Activity(ActivityLabel.TRAIN, command.step))
        for instance in self.instances.values():
            if instance.spec.shares_trainer:
                self._dirty[instance.spec.instance] = instance
                instance.pause(self.now)
        self._at(self._trainer_free, partial(self._trained, command))

    def _trained(self, command: c.Apply) -> None:
        for instance in self.instances.values():
            if instance.spec.shares_trainer:
                self._dirty[instance.spec.instance] = instance
                instance.resume(self.now)
        self._events.append(e.Trained(step=command.step, attempt=command.attempt))

    def _publish(self, command: c.Publish) -> None:
        self.trainer.switch(self.now, Activity(ActivityLabel.PUBLISH, command.version))
        self._after(self.config.trainer.publish_seconds, partial(self._published, command))

    def _published(self, command: c.Publish) -> None:
        self.records.published(command.version, self.now)
        self.trainer.switch(self.now, Activity(ActivityLabel.IDLE, command.version, self._trainer_cause))
        self._events.append(
            e.Published(version=command.version, attempt=command.attempt, fingerprint=fingerprint(command.version))
        )

    def _trainer_idles(self, command: c.TrainerIdles) -> None:
        self._trainer_cause = command.cause
        if self.trainer.current.label is ActivityLabel.IDLE:
            self.trainer.switch(self.now, Activity(ActivityLabel.IDLE, self.trainer.current.version, command.cause))

    _handlers: ClassVar[dict[type[c.Command], Callable[..., None]]] = {
        c.LoadVersion: _load,
        c.UnloadSlot: _unload,
        c.StartGroup: _start,
        c.Resume: _resume,
        c.Move: _move,
        c.Abort: _abort,
        c.SlotIdles: _slot_idles,
        c.FetchPrompts: _fetch,
        c.Score: _score,
        c.GroupWithoutSignal: _without_signal,
        c.Accumulate: _accumulate,
        c.Apply: _apply,
        c.Publish: _publish,
        c.TrainerIdles: _trainer_idles,
    }
