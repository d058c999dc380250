"""Dynamic sampling: groups without signal end with their own outcome and are replaced, within the bound of every mode.

Under faults the same is checked by `test_promises`: a third of its schedules sample dynamically.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.core.types import InstanceSpec, Prompt, SlotId
from dora_rl.orchestrator.config import ControlConfig, ModeName
from dora_rl.orchestrator.modes import MODES
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.chaos import ChaosPlan, ChaosRuntime
from dora_rl.sim.fake_engine import fingerprint
from dora_rl.trainer.algorithms import all_algorithms
from tests.schedules import DEADLINES

BATCH, SIZE = 3, 2
MODE_NAMES = tuple(MODES)


def config(mode: ModeName, cap: int, staleness: int = 2, steps: int | None = None, survivors: int = 1) -> ControlConfig:
    return ControlConfig(
        mode=mode,
        max_staleness=staleness,
        groups_per_step=BATCH,
        group_size=SIZE,
        steps=steps,
        max_response_tokens=64,
        min_survivors=survivors,
        dynamic_sampling=cap,
        deadlines=DEADLINES,
    )


# -- one group -----------------------------------------------------------------------------------------------------


class OneInstance:
    """An orchestrator with one large instance that serves version 0, and prompts without end."""

    def __init__(self, control: ControlConfig) -> None:
        self.orchestrator = Orchestrator(control)
        self.log: list[c.Command] = []
        spec = InstanceSpec(instance="a", slots=1, max_requests=1000, kv_tokens=1_000_000)
        for event in (
            e.InstanceJoined(spec=spec),
            e.PromptsArrived(prompts=tuple(Prompt(key=str(number), tokens=8) for number in range(100))),
            e.TrainerReady(version=0),
            e.Published(version=0, attempt=1, fingerprint=fingerprint(0)),
            e.SlotLoaded(slot=SlotId("a", 0), version=0, fingerprint=fingerprint(0)),
        ):
            self.step(event)

    def step(self, event: e.Event) -> list[c.Command]:
        commands = self.orchestrator.step(event, 0)
        self.orchestrator.check()
        self.log += commands
        return commands

    def end(self, group: int, *rewards: float | None) -> list[c.Command]:
        """End the trajectories of a group, with a reward or by failing, and return the answer to the last one."""
        commands: list[c.Command] = []
        for sibling, reward in enumerate(rewards):
            trajectory = group * SIZE + sibling
            if reward is None:
                commands = self.step(e.TrajectoryFailed(trajectory=trajectory, reason="it failed"))
                continue
            self.step(
                e.Generated(
                    trajectory=trajectory,
                    attempt=0,
                    instance="a",
                    version=0,
                    fingerprint=fingerprint(0),
                    tokens=10,
                    kv_tokens=0,
                )
            )
            commands = self.step(e.Scored(trajectory=trajectory, reward=reward))
        return commands

    def of(self, kind: type[c.Command]) -> list[int]:
        """The groups that commands of one kind have named, in order."""
        named: list[int] = []
        for command in self.log:
            if isinstance(command, kind):
                groups = getattr(command, "groups", None)
                named += [getattr(command, "group", 0)] if groups is None else groups
        return named


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_group_with_equal_rewards_is_replaced_at_once_and_never_trained(mode: ModeName) -> None:
    run = OneInstance(config(mode, cap=4))
    first = len(run.of(c.StartGroup))
    commands = run.end(0, 0.25, 0.25)
    assert [one for one in commands if isinstance(one, c.GroupWithoutSignal)] == [
        c.GroupWithoutSignal(group=0, reward=0.25)
    ]
    assert [one.group for one in commands if isinstance(one, c.StartGroup)] == [first], "one prompt replaces it"
    for group in (1, 2, first):
        run.end(group, 0.0, 1.0)
    assert run.of(c.Apply) == [1, 2, first]
    assert set(run.of(c.Accumulate)) == {1, 2, first}
    assert not run.of(c.GroupFailed)


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_without_the_setting_every_group_is_trained(mode: ModeName) -> None:
    run = OneInstance(config(mode, cap=0))
    for group in range(BATCH):
        run.end(group, 1.0, 1.0)
    assert run.of(c.Apply) == [0, 1, 2]
    assert not run.of(c.GroupWithoutSignal)


@pytest.mark.parametrize("mode", MODE_NAMES)
@pytest.mark.parametrize("cap", [1, 2])
def test_exactly_the_first_groups_of_a_version_are_replaced(mode: ModeName, cap: int) -> None:
    """The last ones end first: which groups are replaced does not depend on the order in which they end."""
    run = OneInstance(config(mode, cap=cap))
    ended: set[int] = set()
    while not run.of(c.Apply):
        group = max(set(run.of(c.StartGroup)) - ended)
        ended.add(group)
        run.end(group, 1.0, 1.0)
    for group in sorted(set(run.of(c.StartGroup)) - ended):
        if group < cap * BATCH:
            run.end(group, 1.0, 1.0)
            ended.add(group)
    assert set(run.of(c.GroupWithoutSignal)) == {group for group in ended if group < cap * BATCH}
    assert min(run.of(c.Apply)) >= cap * BATCH


def test_failing_comes_before_having_no_signal() -> None:
    """`min_survivors` counts first; what survives is compared, and a single survivor has nothing to differ from."""
    run = OneInstance(config("dora", cap=4))
    run.end(0, None, None)
    run.end(1, None, 1.0)
    run.end(2, 1.0, None)
    assert (run.of(c.GroupFailed), run.of(c.GroupWithoutSignal)) == ([0], [1, 2])
    strict = OneInstance(config("dora", cap=4, survivors=2))
    strict.end(0, None, 1.0)
    assert (strict.of(c.GroupFailed), strict.of(c.GroupWithoutSignal)) == ([0], [])


# -- whole runs ----------------------------------------------------------------------------------------------------


def play(control: ControlConfig, seed: int, *, prompts: int, no_signal: float, faults: int = 0) -> ChaosRuntime:
    """Run a schedule until the orchestrator has finished; every event is checked."""
    random_ = random.Random(seed)
    plan = ChaosPlan(
        instances=1 + seed % 4,
        slots=1 + seed % 3,
        max_requests=4,
        prompts=prompts,
        faults=faults,
        no_signal=no_signal,
    )
    runtime = ChaosRuntime(control, plan, lambda below: int(random_.random() * below))
    quiet = 0
    while not runtime.orchestrator.finished:
        quiet = 0 if runtime.act() else quiet + 1
        assert quiet < 200, f"the run does not end: {runtime.orchestrator.snapshot()}"
        if quiet:
            runtime.skip_to_timer()
    return runtime


def synchronous(plan: ChaosPlan, cap: int) -> tuple[dict[int, list[int]], list[int]]:
    """What synchronous training gives, prompt by prompt: the groups of each step, and those without signal."""
    batches: dict[int, list[int]] = {}
    replaced: list[int] = []
    group = 0
    while group < plan.prompts:
        first = group
        batch: list[int] = []
        while len(batch) < BATCH and group < plan.prompts:
            equal = len({plan.reward(group, sibling) for sibling in range(SIZE)}) == 1
            (replaced if equal and group - first < cap * BATCH else batch).append(group)
            group += 1
        if batch:
            batches[len(batches)] = batch
    return batches, replaced


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["sync", "dora"]),
    cap=st.integers(0, 3),
    prompts=st.integers(1, 40),
    no_signal=st.sampled_from([0.2, 0.5, 0.8, 1.0]),
)
def test_staleness_zero_is_synchronous_training(
    seed: int, mode: ModeName, cap: int, prompts: int, no_signal: float
) -> None:
    """Whatever ends first, `sync` and `dora` with K = 0 train and replace the same groups, to the end of the data."""
    runtime = play(config(mode, cap, staleness=0), seed, prompts=prompts, no_signal=no_signal)
    batches, replaced = synchronous(runtime.plan, cap)
    assert {step: sorted(groups) for step, groups in runtime.checker.batches.items()} == batches
    assert sorted(runtime.checker.without_signal) == replaced


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(MODE_NAMES),
    cap=st.integers(1, 3),
    steps=st.integers(1, 5),
    no_signal=st.sampled_from([0.3, 0.7, 1.0]),
    faults=st.sampled_from([0, 0, 6]),
)
def test_the_steps_asked_for_are_full_and_the_run_ends(
    seed: int, mode: ModeName, cap: int, steps: int, no_signal: float, faults: int
) -> None:
    """Also where no prompt gives a signal: then the cap limits what is generated for nothing."""
    runtime = play(config(mode, cap, steps=steps), seed, prompts=10_000, no_signal=no_signal, faults=faults)
    checker = runtime.checker
    assert [len(checker.batches[step]) for step in range(steps)] == [BATCH] * steps
    ended = len(checker.trained) + len(checker.failed) + len(checker.without_signal)
    assert len(checker.admitted) == ended, "every admitted group has exactly one outcome"
    replaced = Counter(checker.admitted[group][1] for group in checker.without_signal)
    assert all(count <= cap * BATCH for count in replaced.values())
    if no_signal == 1.0:
        first = [group for group, (_, version) in enumerate(checker.admitted) if version == 0][: cap * BATCH]
        assert set(first) <= checker.without_signal | checker.failed


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_run_ends_with_its_prompts_although_none_gives_a_signal(mode: ModeName) -> None:
    for seed, prompts in enumerate((1, BATCH, 2 * BATCH - 1, 20)):
        runtime = play(config(mode, cap=100), seed, prompts=prompts, no_signal=1.0)
        assert len(runtime.checker.without_signal) == prompts
        assert not runtime.checker.batches


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_replay_takes_the_same_decisions(mode: ModeName) -> None:
    runtime = play(config(mode, cap=2), 5, prompts=60, no_signal=0.6, faults=6)
    assert runtime.checker.without_signal
    again = Orchestrator(runtime.config)
    for event, at, commands in runtime.log:
        assert again.step(event, at) == commands


# -- refused settings ----------------------------------------------------------------------------------------------


def test_groups_of_one_are_refused() -> None:
    tree = {"groups_per_step": 2, "group_size": 1, "max_response_tokens": 8, "dynamic_sampling": 1}
    with pytest.raises(ConfigError, match="needs a 'group_size' of 2 or more"):
        build(ControlConfig, tree)


def test_which_algorithms_learn_from_equal_rewards() -> None:
    """For these, `RunConfig` refuses to replace groups whose rewards are all equal."""
    learning = {name for name, algorithm in all_algorithms().items() if algorithm.learns_from_equal_rewards}
    assert learning == {"reinforce_pp", "supervised"}
