"""The simulated world: a virtual clock, instances, a trainer, rewards and tools behind the orchestrator's commands.

It is deterministic: ties on the clock break by the order in which entries were made.

    clock:  (time, number, action)  ->  action() may put events into `_events`  ->  orchestrator
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import ClassVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.core.types import (
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
from dora_rl.orchestrator.modes import LayoutKind
from dora_rl.sim.config import SimConfig
from dora_rl.sim.costs import Costs
from dora_rl.sim.instance import SimInstance, SimRequest
from dora_rl.sim.workload import Source

Action = Callable[[], None]
_STARTING = IdleCause(reason=IdleReason.STARTING)


def fingerprint(version: Version) -> str:
    return f"v{version}"


class StepRecord:
    """What one step trained."""

    __slots__ = ("finished_at", "groups", "latency", "longest", "staleness", "tokens")

    def __init__(self, groups: int, tokens: int, longest: int, staleness: Counter[int], latency: Nanoseconds) -> None:
        self.groups = groups
        self.tokens = tokens
        self.longest = longest
        self.staleness = staleness
        self.latency = latency
        """From admission to the last reward, summed over its groups."""
        self.finished_at: Nanoseconds = 0


class SimRuntime:
    """Carries out commands on the virtual clock."""

    def __init__(self, config: SimConfig, layout: LayoutKind, *, keep_segments: bool = False) -> None:
        self.config = config
        self.costs = Costs(config)
        self.source = Source(
            config.workload, config.control.group_size, config.control.max_response_tokens, config.seed
        )
        self.now: Nanoseconds = 0
        self.steps: dict[StepId, StepRecord] = {}
        self.versions_live: dict[Version, int] = {}
        """Versions that had requests when each version was published."""
        self.moves: list[tuple[Nanoseconds, SlotId, SlotId, int]] = []
        """When, from, to, and how many requests."""
        self.tokens_moved = 0
        self.events = 0
        self._clock: list[tuple[Nanoseconds, int, Action]] = []
        self._number = 0
        self._events: deque[e.Event] = deque()
        self._dirty: dict[InstanceId, SimInstance] = {}
        self._home: dict[TrajectoryId, SimInstance] = {}
        self._where: dict[TrajectoryId, SimRequest] = {}
        self._versions: list[Version] = []
        """Of each group, by its id."""
        self._lengths: dict[int, tuple[int, int]] = {}
        """Sum and maximum of the response tokens of each untrained group."""
        self._spans: dict[int, tuple[Nanoseconds, Nanoseconds]] = {}
        """When each untrained group was admitted, and when its latest reward is there."""
        self._running: Counter[Version] = Counter()
        self._prompts = 0
        self._last_step = config.warmup_steps + config.steps

        self.trainer_devices, sharing, dedicated = config.divide(layout)
        self.trainer = TimeAccount(0, Activity(ActivityLabel.IDLE, None, _STARTING), keep_segments=keep_segments)
        self._trainer_cause = _STARTING
        self._trainer_free: Nanoseconds = 0
        self._trainer_step: StepId = 0
        self.instances: dict[InstanceId, SimInstance] = {}
        for number in range(sharing + dedicated):
            self._add_instance(number, shares_trainer=number < sharing, keep_segments=keep_segments)
        self._events.append(e.TrainerReady(version=0))
        self._at(nanoseconds(config.control.rebalance_seconds / 2), self._heartbeat)

    # -- the port ---------------------------------------------------------------------------------------------

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[e.Event, Nanoseconds] | None:
        """The next thing that the orchestrator hears of; None when all steps are done."""
        if self._last_step in self.versions_live:
            return None
        while not self._events:
            if wake_at is not None and (not self._clock or wake_at < self._clock[0][0]):
                self.now = max(self.now, wake_at)
                self._events.append(e.Tick())
                break
            assert self._clock, "nothing will ever happen again"
            self.now, _, action = heapq.heappop(self._clock)
            action()
            self._schedule_dirty()
        self.events += 1
        return self._events.popleft(), self.now

    def execute(self, commands: Iterable[c.Command]) -> None:
        for command in commands:
            handler = self._handlers.get(type(command))
            if handler is not None:
                handler(self, command)
        self._schedule_dirty()

    def close(self) -> None:
        """Settle all accounts at the present moment."""
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
        """Bring the instance up to date before it is changed, and see to its wake-up and labels after."""
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
        del self._home[trajectory]
        del self._where[trajectory]
        group = trajectory // self.config.control.group_size
        self._running[self._versions[group]] -= 1
        tokens = sum(turn.tokens for turn in request.turns)
        total, longest = self._lengths[group]
        self._lengths[group] = (total + tokens, max(longest, tokens))
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
        """The tool's answer is there: KV comes back from host memory, the answer is prefilled, decoding goes on."""
        turn = request.turns[request.turn]
        instance = self._home.get(request.trajectory)
        if instance is None:  # it is being moved: it goes on when it has arrived
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
        """Every instance says how far it is."""
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
        assert group == len(self._versions)
        self._versions.append(command.version)
        self._lengths[group] = (0, 0)
        self._spans[group] = (self.now, self.now)
        self._running[command.version] += size
        # The siblings share their prompt's KV, which is computed once.
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
            self._settle_in(instance, request)

    def _resume(self, command: c.Resume) -> None:
        instance = self.instances[command.slot.instance]
        request = self._where[command.trajectory]
        self._touch(instance)
        request.attempt = command.attempt
        request.slot = command.slot.number
        instance.stall(self.now, ActivityLabel.REPREFILL, self.costs.prefill(int(request.context)))
        self._settle_in(instance, request)

    def _settle_in(self, instance: SimInstance, request: SimRequest) -> None:
        instance.requests[request.trajectory] = request
        self._home[request.trajectory] = instance
        self._where[request.trajectory] = request
        if not request.parked:
            instance.join(request)

    def _move(self, command: c.Move) -> None:
        """Requests leave with their KV and arrive when it has gone over the link."""
        source = self.instances[command.source.instance]
        target = self.instances[command.target.instance]
        self._touch(source)
        leaving = [
            request for trajectory in command.trajectories if (request := source.requests.get(trajectory)) is not None
        ]
        if not leaving:
            return
        for request in leaving:
            source.take_out(request)
            del self._home[request.trajectory]
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
            self._settle_in(target, request)
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
            instance.take_out(request)
            del self._home[request.trajectory]

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
        event = e.Scored(trajectory=command.trajectory, reward=0.0)
        seconds = self.config.workload.reward_seconds
        group = command.trajectory // self.config.control.group_size
        self._spans[group] = (self._spans[group][0], self.now + nanoseconds(seconds))
        if seconds:
            self._after(seconds, partial(self._events.append, event))
        else:
            self._events.append(event)

    def _accumulate(self, command: c.Accumulate) -> None:
        tokens = sum(self._group_tokens(group) for group in command.groups)
        seconds = self.costs.train(tokens, self.trainer_devices)
        self._trainer_free = max(self._trainer_free, self.now) + nanoseconds(seconds)
        self._trainer_step = command.step
        self.trainer.switch(self.now, Activity(ActivityLabel.TRAIN, command.step))
        free = self._trainer_free
        self._at(free, partial(self._accumulated, command, free))

    def _group_tokens(self, group: int) -> int:
        prompts = self.source.prompt_tokens(group) * self.config.control.group_size
        return prompts + self._lengths[group][0]

    def _accumulated(self, command: c.Accumulate, free: Nanoseconds) -> None:
        self._events.append(e.Accumulated(step=command.step, attempt=command.attempt, groups=len(command.groups)))
        if free == self._trainer_free and self.trainer.current.label is ActivityLabel.TRAIN:
            self.trainer.switch(self.now, Activity(ActivityLabel.IDLE, self._trainer_step, self._trainer_cause))

    def _apply(self, command: c.Apply) -> None:
        staleness = Counter(command.step - self._versions[group] for group in command.groups)
        lengths = [self._lengths.pop(group) for group in command.groups]
        spans = [self._spans.pop(group) for group in command.groups]
        self.steps[command.step] = StepRecord(
            groups=len(command.groups),
            tokens=sum(total for total, _ in lengths),
            longest=max(longest for _, longest in lengths),
            staleness=staleness,
            latency=sum(end - start for start, end in spans),
        )
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
        self.versions_live[command.version] = sum(1 for count in self._running.values() if count)
        if command.version - 1 in self.steps:
            self.steps[command.version - 1].finished_at = self.now
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
        c.Accumulate: _accumulate,
        c.Apply: _apply,
        c.Publish: _publish,
        c.TrainerIdles: _trainer_idles,
    }
