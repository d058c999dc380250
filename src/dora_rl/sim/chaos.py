"""A world that does its worst: seeded schedules with faults at any point.

Instances, trainer, rewards and messages behave as the contract of `core.events` allows, in an order that `choose`
picks: reports come late, twice and out of order; instances are lost during loads and moves, or fall silent; moves
fail half-way; rewards fail or hang; the trainer dies at any moment. The number of faults is limited, and after that
the schedule is fair, so a run that does not end has stalled.

The fake engine checks C1 itself: it stamps what served each token, and refuses what contradicts its slots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import msgspec

from dora_rl.control.config import ControlConfig
from dora_rl.control.orchestrator import Orchestrator
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.nouns import (
    Attempt,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    Prompt,
    SlotId,
    TrajectoryId,
    Version,
    nanoseconds,
)
from dora_rl.sim.witness import Witness, demand

T = TypeVar("T")
_KV_EACH = 16
"""Tokens of KV that a fake request holds."""
Choose = Callable[[int], int]
"""Picks a number below the given one."""


def fingerprint(version: Version) -> str:
    return f"weights-{version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """The size of a schedule."""

    instances: int
    slots: int
    max_requests: int
    prompts: int
    faults: int
    shares_trainer: bool = False
    tools: bool = False
    kv_tokens: int = 1 << 20


@dataclass(slots=True)
class FakeRequest:
    """A trajectory on a fake engine."""

    attempt: Attempt
    slot: int
    served: list[Version] = field(default_factory=list)
    parked: bool = False


@dataclass(slots=True)
class Bundle:
    """Requests on their way to an instance."""

    move: c.Move
    requests: dict[TrajectoryId, FakeRequest]


class FakeInstance:
    """An engine that carries out its commands one by one, when told to."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.inbox: deque[c.Command | Bundle] = deque()
        self.slots: list[Version | None] = [None] * spec.slots
        self.requests: dict[TrajectoryId, FakeRequest] = {}
        self.silent = False

    @property
    def kv_tokens(self) -> int:
        return _KV_EACH * len(self.requests)


class ChaosWorld:
    """One schedule."""

    def __init__(self, config: ControlConfig, plan: ChaosPlan, choose: Choose) -> None:
        self.config = config
        self.plan = plan
        self.choose = choose
        self.orchestrator = Orchestrator(config)
        self.witness = Witness(config)
        self.now: Nanoseconds = 0
        self.events = 0
        self.log: list[tuple[e.Event, Nanoseconds, list[c.Command]]] = []
        self.faults_left = plan.faults
        self.faults: Counter[str] = Counter()
        self.instances: dict[InstanceId, FakeInstance] = {}
        self._reports: list[e.Event] = []
        self._to_score: list[TrajectoryId] = []
        self._hung: set[TrajectoryId] = set()
        self._trainer: deque[c.Command] = deque()
        self._trainer_up = False
        self._trainer_version: Version = 0
        self._checkpoint: Version = 0
        self._prompts_given = 0
        self._names = 0
        self._move_fault = ""
        for _ in range(plan.instances):
            self.join()
        self.start_trainer()
        self.tell(e.Tick())

    # -- running ----------------------------------------------------------------------------------------------

    def run(self, limit: int = 200_000) -> None:
        """Act until the orchestrator has finished, then check that all is accounted for."""
        quiet = 0
        for _ in range(limit):
            if self.orchestrator.finished:
                break
            if self.act():
                quiet = 0
            else:
                quiet += 1
                demand(quiet < 200, f"stall: {self.orchestrator.snapshot()}")
                self.jump()
        demand(self.orchestrator.finished, f"not finished after {limit} actions: {self.orchestrator.snapshot()}")
        self._settle()
        self.witness.check_finished(self.orchestrator.snapshot(), prompts=self.plan.prompts)
        leftovers = [name for name, it in self.instances.items() if it.requests and not it.silent]
        demand(not leftovers, f"engines {leftovers} still hold requests")

    def _settle(self) -> None:
        """Deliver what is still on its way."""
        for _ in range(100_000):
            if not self.act(faults=False):
                return

    def act(self, *, faults: bool = True) -> bool:
        """Do one thing that can happen now; False if nothing can."""
        self.now += 1 + self.choose(nanoseconds(0.2))
        actions: list[Callable[[], None]] = [self._deliver] * min(3, len(self._reports))
        for instance in self.instances.values():
            if instance.silent:
                continue
            if instance.inbox:
                actions.append(lambda instance=instance: self._obey(instance))  # type: ignore[misc]
            if instance.requests:
                actions.append(lambda instance=instance: self._generate(instance))  # type: ignore[misc]
        if any(trajectory not in self._hung for trajectory in self._to_score):
            actions.append(self._reward)
        if self._trainer and self._trainer_up:
            actions.append(self._train)
        if faults and self.faults_left and self.choose(12) == 0:
            self._fault()
            return True
        if not actions:
            return False
        actions[self.choose(len(actions))]()
        return True

    def tell(self, event: e.Event) -> None:
        """Give the orchestrator one event, and carry out what it says."""
        self.events += 1
        commands = self.orchestrator.step(event, self.now)
        self.log.append((event, self.now, commands))
        self.witness.observe(event, commands)
        self.witness.check_conserving(self.orchestrator.snapshot())
        for command in commands:
            self._carry_out(command)

    def jump(self) -> None:
        """Nothing happens until the next deadline; healthy instances give a sign of life just before it."""
        due = self.orchestrator.wake_at()
        demand(due is not None, f"the orchestrator waits for nothing: {self.orchestrator.snapshot()}")
        assert due is not None
        self.now = max(self.now, due - 1)
        for name, instance in list(self.instances.items()):
            if not instance.silent:
                self.tell(e.Progress(instance=name, kv_tokens=instance.kv_tokens))
        self.now += 1
        self.tell(e.Tick())

    # -- faults -----------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        self.inject(sorted(self.FAULTS)[self.choose(len(self.FAULTS))])

    def inject(self, kind: str) -> None:
        """Let something break, if it can now."""
        self.faults_left -= 1
        happened = self.FAULTS[kind](self)
        if happened and not kind.startswith("move"):  # a move's fault counts when it happens
            self.faults[kind] += 1

    def join(self) -> bool:
        self._names += 1
        spec = InstanceSpec(
            instance=f"i{self._names}",
            slots=self.plan.slots,
            max_requests=self.plan.max_requests,
            kv_tokens=self.plan.kv_tokens,
            shares_trainer=self.plan.shares_trainer and self._names % 2 == 0,
        )
        self.instances[spec.instance] = FakeInstance(spec)
        self._reports.append(e.InstanceJoined(spec=spec))
        return True

    def _lose_instance(self) -> bool:
        if not self.instances:
            return False
        name = self._pick(list(self.instances))
        del self.instances[name]
        # A join that was not delivered yet is never seen: its process is gone.
        self._reports = [r for r in self._reports if not (isinstance(r, e.InstanceJoined) and r.spec.instance == name)]
        self._reports.append(e.InstanceLost(instance=name, reason="killed"))
        self.join()
        return True

    def _silence(self) -> bool:
        names = [name for name, instance in self.instances.items() if not instance.silent]
        if not names:
            return False
        self.instances[self._pick(names)].silent = True
        return True

    def _duplicate(self) -> bool:
        if not self._reports:
            return False
        report = self._reports[self.choose(len(self._reports))]
        if isinstance(report, e.PromptsArrived | e.TrainerReady | e.TrainerLost):
            return False  # these come over a channel that does not repeat
        self._reports.append(report)
        return True

    def _fail_load(self) -> bool:
        for name, instance in self.instances.items():
            if instance.inbox and isinstance(instance.inbox[0], c.LoadVersion):
                load = instance.inbox.popleft()
                assert isinstance(load, c.LoadVersion)
                if load.in_flight:
                    instance.inbox.appendleft(load)
                    return False
                instance.slots[load.slot.number] = None
                self._reports.append(e.SlotLoadFailed(slot=load.slot, version=load.version, reason=f"disk of {name}"))
                return True
        return False

    def _fail_move(self, how: str) -> bool:
        """The next move fails half-way."""
        self._move_fault = how
        return True

    def _break_off(self, instance: FakeInstance, move: c.Move, how: str) -> None:
        """A first part of the move goes through; the rest is kept at the source, or lost, or lost without a word."""
        through = self.choose(len(move.trajectories))
        first, rest = slice(None, through), slice(through, None)
        self._export(
            instance,
            msgspec.structs.replace(move, trajectories=move.trajectories[first], attempts=move.attempts[first]),
        )
        there = [
            (trajectory, attempt)
            for trajectory, attempt in zip(move.trajectories[rest], move.attempts[rest], strict=True)
            if trajectory in instance.requests and instance.requests[trajectory].attempt == attempt
        ]
        if how != "kept":
            for trajectory, _ in there:
                del instance.requests[trajectory]
        if how != "silent" and there:
            self._reports.append(
                e.MoveFailed(
                    trajectories=tuple(trajectory for trajectory, _ in there),
                    attempts=tuple(attempt for _, attempt in there),
                    source=move.source,
                    target=move.target,
                    kept=how == "kept",
                )
            )

    def _fail_reward(self) -> bool:
        if not self._to_score:
            return False
        trajectory = self._to_score.pop(self.choose(len(self._to_score)))
        self._reports.append(e.TrajectoryFailed(trajectory=trajectory, reason="reward raised"))
        return True

    def _hang_reward(self) -> bool:
        if not self._to_score:
            return False
        self._hung.add(self._to_score[self.choose(len(self._to_score))])
        return True

    def _fail_environment(self) -> bool:
        running = [t for instance in self.instances.values() for t in instance.requests]
        if not running:
            return False
        self._reports.append(e.TrajectoryFailed(trajectory=self._pick(running), reason="environment raised"))
        return True

    def lose_trainer(self) -> bool:
        if not self._trainer_up:
            return False
        self._trainer_up = False
        self._trainer.clear()
        # The channel to a trainer is ordered: what it had said arrives before the news of its loss.
        for report in [r for r in self._reports if isinstance(r, e.Trained | e.Published | e.TrainerReady)]:
            if self.choose(2):
                self._reports.remove(report)
                self.tell(report)
        self.tell(e.TrainerLost(reason="killed"))
        self.start_trainer()
        return True

    def _hang_trainer(self) -> bool:
        if not self._trainer_up:
            return False
        self._trainer_up = False
        return True

    def _change_bound(self) -> bool:
        """Not a fault, but as untimely: another K, on its way like any report."""
        if self.config.mode != "dora":
            return False
        self._reports.append(e.BoundChanged(max_staleness=self.choose(5)))
        return True

    def _time_jump(self) -> bool:
        self.jump()
        return True

    # -- the parts --------------------------------------------------------------------------------------------

    def start_trainer(self) -> None:
        self._trainer.clear()
        self._reports = [r for r in self._reports if not isinstance(r, e.TrainerReady)]
        self._trainer_up = True
        self._trainer_version = self._checkpoint
        self._reports.append(e.TrainerReady(version=self._checkpoint))

    def _deliver(self) -> None:
        self.tell(self._reports.pop(self.choose(len(self._reports))))

    def _pick(self, names: list[T]) -> T:
        return names[self.choose(len(names))]

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.LoadVersion() | c.UnloadSlot() | c.StartGroup() | c.Resume():
                self._send(command.slot.instance, command)
            case c.Move():
                self._send(command.source.instance, command)
            case c.Abort():
                self._send(command.instance, command)
            case c.Score():
                self._to_score.append(command.trajectory)
            case c.Accumulate() | c.Apply() | c.Publish():
                self._trainer.append(command)
            case c.FetchPrompts():
                self._fetch(command.count)
            case c.EvictInstance():
                self.instances.pop(command.instance, None)
                self.join()
            case c.RestartTrainer():
                self.start_trainer()
            case _:
                pass

    def _send(self, instance: InstanceId, message: c.Command | Bundle) -> None:
        if instance in self.instances:
            self.instances[instance].inbox.append(message)

    FAULTS: ClassVar[dict[str, Callable[[ChaosWorld], bool]]] = {
        "instance lost": _lose_instance,
        "instance silent": _silence,
        "instance joined": join,
        "report duplicated": _duplicate,
        "load failed": _fail_load,
        "move failed, kept": lambda world: world._fail_move("kept"),
        "move failed, lost": lambda world: world._fail_move("lost"),
        "move failed, silent": lambda world: world._fail_move("silent"),
        "reward failed": _fail_reward,
        "reward hung": _hang_reward,
        "trainer lost": lose_trainer,
        "trainer hung": _hang_trainer,
        "environment failed": _fail_environment,
        "time jumped": _time_jump,
        "bound changed": _change_bound,
    }

    def _fetch(self, count: int) -> None:
        first = self._prompts_given
        self._prompts_given = min(self.plan.prompts, first + count)
        prompts = tuple(Prompt(key=f"p{number}", tokens=1) for number in range(first, self._prompts_given))
        self._reports.append(e.PromptsArrived(prompts=prompts, last=self._prompts_given == self.plan.prompts))

    def _obey(self, instance: FakeInstance) -> None:
        message = instance.inbox.popleft()
        match message:
            case c.LoadVersion():
                number = message.slot.number
                on_slot = [t for t, request in instance.requests.items() if request.slot == number]
                demand(message.in_flight or not on_slot, f"C1: {message.slot} is loaded under requests {on_slot}")
                instance.slots[number] = message.version
                self._reports.append(
                    e.SlotLoaded(slot=message.slot, version=message.version, fingerprint=fingerprint(message.version))
                )
            case c.UnloadSlot():
                on_slot = [t for t, request in instance.requests.items() if request.slot == message.slot.number]
                demand(not on_slot, f"{message.slot} is unloaded under requests {on_slot}")
                instance.slots[message.slot.number] = None
            case c.StartGroup():
                size = self.config.group_size
                for trajectory in range(message.group * size, (message.group + 1) * size):
                    self._begin(instance, trajectory, 0, message.slot, message.version)
            case c.Resume():
                self._begin(instance, message.trajectory, message.attempt, message.slot, message.version)
            case c.Move() if self._move_fault:
                how, self._move_fault = self._move_fault, ""
                self.faults[f"move failed, {how}"] += 1
                self._break_off(instance, message, how)
            case c.Move():
                self._export(instance, message)
            case c.Abort():
                request = instance.requests.get(message.trajectory)
                if request is not None and request.attempt == message.attempt:
                    del instance.requests[message.trajectory]
            case Bundle():
                self._import(instance, message)
            case _:
                raise AssertionError(f"an engine got {message}")

    def _begin(
        self, instance: FakeInstance, trajectory: TrajectoryId, attempt: Attempt, slot: SlotId, version: Version
    ) -> None:
        serves = instance.slots[slot.number]
        mixes = self.config.mode == "partial"
        demand(serves is not None and (mixes or serves == version), f"C1: {slot} serves {serves}, not {version}")
        demand(trajectory not in instance.requests, f"trajectory {trajectory} runs twice on {slot}")
        instance.requests[trajectory] = FakeRequest(attempt=attempt, slot=slot.number)
        # With tools there may be more for a while: parked requests that come back queue in the engine.
        full = len(instance.requests) > instance.spec.max_requests and not self.plan.tools
        demand(not full, f"{slot} has more requests than it can take")

    def _export(self, instance: FakeInstance, move: c.Move) -> None:
        leaving = {
            trajectory: instance.requests[trajectory]
            for trajectory, attempt in zip(move.trajectories, move.attempts, strict=True)
            if trajectory in instance.requests and instance.requests[trajectory].attempt == attempt
        }
        if not leaving:
            return
        for trajectory in leaving:
            del instance.requests[trajectory]
        self._send(move.target.instance, Bundle(move=move, requests=leaving))

    def _import(self, instance: FakeInstance, bundle: Bundle) -> None:
        """An engine takes a bundle only if the slot serves its version still."""
        move = bundle.move
        attempts = tuple(request.attempt for request in bundle.requests.values())
        if instance.slots[move.target.number] != move.version:
            self._reports.append(
                e.MoveFailed(
                    trajectories=tuple(bundle.requests),
                    attempts=attempts,
                    source=move.source,
                    target=move.target,
                    kept=False,
                )
            )
            return
        for trajectory, request in bundle.requests.items():
            request.slot = move.target.number
            instance.requests[trajectory] = request
        self._reports.append(
            e.Moved(trajectories=tuple(bundle.requests), attempts=attempts, source=move.source, target=move.target)
        )

    def _generate(self, instance: FakeInstance) -> None:
        """A request samples a token, or parks, or ends."""
        trajectory = list(instance.requests)[self.choose(len(instance.requests))]
        request = instance.requests[trajectory]
        if request.parked:
            request.parked = False
            self._reports.append(
                e.Unparked(trajectory=trajectory, attempt=request.attempt, kv_tokens=instance.kv_tokens)
            )
            return
        version = instance.slots[request.slot]
        demand(version is not None, f"trajectory {trajectory} decodes on a slot without weights")
        assert version is not None
        request.served.append(version)
        what = self.choose(8)
        if what == 0 and self.plan.tools:
            request.parked = True
            self._reports.append(e.Parked(trajectory=trajectory, attempt=request.attempt, kv_tokens=instance.kv_tokens))
        elif what < 4:
            tagged = self.witness.admitted[trajectory // self.config.group_size][1]
            single = set(request.served) == {tagged}
            demand(single or self.config.mode == "partial", f"C1: trajectory {trajectory} was served {request.served}")
            del instance.requests[trajectory]
            self._reports.append(
                e.Generated(
                    trajectory=trajectory,
                    attempt=request.attempt,
                    instance=instance.spec.instance,
                    version=version,
                    fingerprint=fingerprint(version),
                    tokens=1 + self.choose(self.config.max_response_tokens),
                    kv_tokens=instance.kv_tokens,
                )
            )

    def _reward(self) -> None:
        ready = [trajectory for trajectory in self._to_score if trajectory not in self._hung]
        trajectory = ready[self.choose(len(ready))]
        self._to_score.remove(trajectory)
        self._reports.append(e.Scored(trajectory=trajectory, reward=1.0))

    def _train(self) -> None:
        command = self._trainer.popleft()
        match command:
            case c.Accumulate():
                self._reports.append(
                    e.Accumulated(step=command.step, attempt=command.attempt, groups=len(command.groups))
                )
            case c.Apply():
                demand(command.step == self._trainer_version, f"step {command.step} from {self._trainer_version}")
                self._trainer_version = command.step + 1
                self._reports.append(e.Trained(step=command.step, attempt=command.attempt))
            case c.Publish():
                self._reports.append(
                    e.Published(
                        version=command.version, attempt=command.attempt, fingerprint=fingerprint(command.version)
                    )
                )
                if self.choose(3) == 0:
                    # Written before anybody is told of it, so a restart never comes back with less.
                    self._checkpoint = command.version
            case _:
                pass
