"""A runtime that injects faults at any point of a seeded schedule.

Instances, trainer, rewards and messages do anything that the contract of `core.events` allows, in an order that
`choose` picks: reports arrive late, twice and out of order; instances are lost during loads and moves, or stop
reporting; moves fail half-way; rewards fail or hang; the trainer dies at any moment. The number of faults is limited.
After the last one the schedule is fair, so a run that does not end has stalled. The engines are those of
`sim.fake_engine`.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.types import (
    GroupId,
    InstanceId,
    InstanceSpec,
    Nanoseconds,
    Prompt,
    TrajectoryId,
    Version,
    nanoseconds,
)
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.fake_engine import Choose, FakeBundle, FakeInstance, fingerprint
from dora_rl.sim.invariants import InvariantChecker, require

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """The size of a schedule and the kinds of things in it."""

    instances: int
    slots: int
    max_requests: int
    prompts: int
    faults: int
    one_batch: bool = False
    shares_trainer: bool = False
    tools: bool = False
    kv_tokens: int = 1 << 20
    no_signal: float = 1.0
    """Share of the groups whose rewards are all equal; which ones depends on their number only."""

    def reward(self, group: GroupId, sibling: int) -> float:
        """The reward of a trajectory. It does not depend on the schedule, as with a fixed policy."""
        equal = zlib.crc32(b"%d" % group) < self.no_signal * 2**32
        return float(group % 2) if equal else float(sibling % 2)


class ChaosRuntime:
    """Runs the orchestrator through one schedule."""

    def __init__(self, config: ControlConfig, plan: ChaosPlan, choose: Choose) -> None:
        self.config = config
        self.plan = plan
        self.choose = choose
        self.tools = plan.tools
        self.orchestrator = Orchestrator(config)
        self.checker = InvariantChecker(config)
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
        self.deliver(e.Tick())

    # -- running ----------------------------------------------------------------------------------------------

    def run(self, limit: int = 200_000) -> None:
        """Act until the orchestrator has finished, then check that everything is accounted for."""
        quiet = 0
        for _ in range(limit):
            if self.orchestrator.finished:
                break
            if self.act():
                quiet = 0
            else:
                quiet += 1
                require(quiet < 200, f"stall: {self.orchestrator.snapshot()}")
                self.skip_to_timer()
        require(self.orchestrator.finished, f"not finished after {limit} actions: {self.orchestrator.snapshot()}")
        self._settle()
        self.checker.check_finished(self.orchestrator.snapshot(), prompts=self.plan.prompts)
        leftovers = [name for name, it in self.instances.items() if it.requests and not it.silent]
        require(not leftovers, f"engines {leftovers} still hold requests")

    def _settle(self) -> None:
        """Deliver the remaining reports and execute the remaining commands."""
        for _ in range(100_000):
            if not self.act(faults=False):
                return

    def act(self, *, faults: bool = True) -> bool:
        """Let one of the possible things happen; return False if there is none."""
        self.now += 1 + self.choose(nanoseconds(0.2))
        actions: list[Callable[[], None]] = [self._deliver_report] * min(3, len(self._reports))
        for instance in self.instances.values():
            if instance.silent:
                continue
            if instance.inbox:
                actions.append(lambda instance=instance: self._execute_next(instance))  # type: ignore[misc]
            if instance.requests:
                actions.append(instance.generate)
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

    def deliver(self, event: e.Event) -> None:
        """Give the orchestrator one event, check the promises and execute its commands."""
        self.events += 1
        commands = self.orchestrator.step(event, self.now)
        self.orchestrator.check()
        self.log.append((event, self.now, commands))
        self.checker.observe(event, commands)
        snapshot = self.orchestrator.snapshot()
        self.checker.check_outcomes(snapshot)
        self.checker.check_idle_slots(snapshot)
        for command in commands:
            self._execute(command)

    def skip_to_timer(self) -> None:
        """Advance the time to the orchestrator's next timer; healthy instances report just before it."""
        due = self.orchestrator.wake_at()
        require(due is not None, f"the orchestrator waits for nothing: {self.orchestrator.snapshot()}")
        assert due is not None
        self.now = max(self.now, due - 1)
        for name, instance in list(self.instances.items()):
            if not instance.silent:
                self.deliver(e.Progress(instance=name, kv_tokens=instance.kv_tokens, tokens=instance.decode()))
        self.now += 1
        self.deliver(e.Tick())

    # -- faults -----------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        self.inject(sorted(self.FAULTS)[self.choose(len(self.FAULTS))])

    def inject(self, kind: str) -> None:
        """Inject a fault, if it is possible now."""
        self.faults_left -= 1
        happened = self.FAULTS[kind](self)
        if happened and not kind.startswith("move"):  # a failed move is counted when the move is executed
            self.faults[kind] += 1

    def join(self) -> bool:
        self._names += 1
        spec = InstanceSpec(
            instance=f"i{self._names}",
            slots=self.plan.slots,
            max_requests=self.plan.max_requests,
            kv_tokens=self.plan.kv_tokens,
            one_batch=self.plan.one_batch,
            shares_trainer=self.plan.shares_trainer and self._names % 2 == 0,
        )
        self.instances[spec.instance] = FakeInstance(spec, self)
        self._reports.append(e.InstanceJoined(spec=spec))
        return True

    def _lose_instance(self) -> bool:
        if not self.instances:
            return False
        name = self._pick(list(self.instances))
        del self.instances[name]
        # A join that has not been delivered never will be, since its process is gone.
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
            return False  # these come over a channel that never delivers twice
        self._reports.append(report)
        return True

    def _drop_requests(self) -> bool:
        return any(instance.drop_requests() for instance in self.instances.values())

    def _fail_load(self) -> bool:
        return any(instance.fail_load() for instance in self.instances.values())

    def _fail_move(self, how: str) -> bool:
        """Let the next move fail half-way."""
        self._move_fault = how
        return True

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
        # The channel to a trainer is ordered: its earlier reports arrive before the report of its loss.
        for report in [r for r in self._reports if isinstance(r, e.Trained | e.Published | e.TrainerReady)]:
            if self.choose(2):
                self._reports.remove(report)
                self.deliver(report)
        self.deliver(e.TrainerLost(reason="killed"))
        self.start_trainer()
        return True

    def _hang_trainer(self) -> bool:
        if not self._trainer_up:
            return False
        self._trainer_up = False
        return True

    def _change_bound(self) -> bool:
        """Change the bound K. It is not a fault, but it may come at any time, like any report."""
        if not self.config.mode_spec.bound_can_change:
            return False
        self._reports.append(e.BoundChanged(max_staleness=self.choose(5)))
        return True

    def _time_jump(self) -> bool:
        self.skip_to_timer()
        return True

    # -- commands and reports ---------------------------------------------------------------------------------

    def start_trainer(self) -> None:
        self._trainer.clear()
        self._reports = [r for r in self._reports if not isinstance(r, e.TrainerReady)]
        self._trainer_up = True
        self._trainer_version = self._checkpoint
        self._reports.append(e.TrainerReady(version=self._checkpoint))

    def _deliver_report(self) -> None:
        self.deliver(self._reports.pop(self.choose(len(self._reports))))

    def _pick(self, names: list[T]) -> T:
        return names[self.choose(len(names))]

    def _execute(self, command: c.Command) -> None:
        match command:
            case c.LoadVersion() | c.UnloadSlot() | c.StartGroup() | c.Resume():
                self.send(command.slot.instance, command)
            case c.Move():
                self.send(command.source.instance, command)
            case c.Abort():
                self.send(command.instance, command)
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

    def send(self, instance: InstanceId, message: c.Command | FakeBundle) -> None:
        if instance in self.instances:
            self.instances[instance].inbox.append(message)

    def report(self, event: e.Event) -> None:
        self._reports.append(event)

    def admitted_version(self, group: GroupId) -> Version:
        return self.checker.admitted[group][1]

    FAULTS: ClassVar[dict[str, Callable[[ChaosRuntime], bool]]] = {
        "instance lost": _lose_instance,
        "instance silent": _silence,
        "instance joined": join,
        "requests missed": _drop_requests,
        "report duplicated": _duplicate,
        "load failed": _fail_load,
        "move failed, kept": lambda runtime: runtime._fail_move("kept"),
        "move failed, lost": lambda runtime: runtime._fail_move("lost"),
        "move failed, silent": lambda runtime: runtime._fail_move("silent"),
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

    def _execute_next(self, instance: FakeInstance) -> None:
        message = instance.inbox[0]
        if isinstance(message, c.Move) and self._move_fault:
            instance.inbox.popleft()
            how, self._move_fault = self._move_fault, ""
            self.faults[f"move failed, {how}"] += 1
            instance.interrupt_move(message, how)
        else:
            instance.execute_next()

    def _reward(self) -> None:
        ready = [trajectory for trajectory in self._to_score if trajectory not in self._hung]
        trajectory = ready[self.choose(len(ready))]
        self._to_score.remove(trajectory)
        reward = self.plan.reward(*divmod(trajectory, self.config.group_size))
        self._reports.append(e.Scored(trajectory=trajectory, reward=reward))

    def _train(self) -> None:
        command = self._trainer.popleft()
        match command:
            case c.Accumulate():
                self._reports.append(
                    e.Accumulated(step=command.step, attempt=command.attempt, groups=len(command.groups))
                )
            case c.Apply():
                require(command.step == self._trainer_version, f"step {command.step} from {self._trainer_version}")
                self._trainer_version = command.step + 1
                self._reports.append(e.Trained(step=command.step, attempt=command.attempt))
            case c.Publish():
                self._reports.append(
                    e.Published(
                        version=command.version, attempt=command.attempt, fingerprint=fingerprint(command.version)
                    )
                )
                if self.choose(3) == 0:
                    # It is written before it is reported, so a restart never goes back beyond a reported checkpoint.
                    self._checkpoint = command.version
            case _:
                pass
