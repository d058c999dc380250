"""A run that is asked for more steps, at any moment or after its end, keeps all promises."""

from __future__ import annotations

import math
import random

import pytest

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import UserError
from dora_rl.ledger.auditor import Auditor, Terms
from dora_rl.ledger.writer import LoggedEvent
from dora_rl.orchestrator.config import ModeName
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.chaos import ChaosRuntime
from tests.schedules import draw_config, draw_plan


def begin(seed: int, steps: int, mode: ModeName | None = None, faults: int | None = None) -> ChaosRuntime:
    """A schedule that is asked for some steps."""
    random_ = random.Random(seed)
    config = draw_config(random_, mode).model_copy(update={"steps": steps, "max_staleness": seed % 4})
    plan = draw_plan(random_, config)
    runtime = ChaosRuntime(config, plan, lambda below: int(random_.random() * below))
    if faults is not None:
        runtime.faults_left = faults
    return runtime


def until(runtime: ChaosRuntime, actions: int) -> None:
    """Act until the run has finished, or for so many actions."""
    for _ in range(actions):
        if runtime.orchestrator.finished:
            return
        if not runtime.act():
            runtime.skip_to_timer()


def all_steps(runtime: ChaosRuntime) -> int:
    """More steps than the prompts suffice for."""
    return math.ceil(runtime.plan.prompts / runtime.config.groups_per_step) + 1


def extended(seed: int) -> ChaosRuntime:
    """A run that is asked for more steps several times, some of them after it has finished, until its data ends."""
    runtime = begin(seed, steps=1)
    random_ = random.Random(seed)
    steps = 1
    while steps < all_steps(runtime):
        until(runtime, random_.choice((3, 30, 10_000)))
        steps += random_.randint(0, 2)
        runtime.deliver(e.StepsChanged(steps=steps))
    runtime.run()  # it checks that every prompt has had exactly one outcome
    return runtime


@pytest.mark.parametrize("seeds", [range(start, start + 40) for start in (0, 40, 80)], ids=str)
def test_every_promise_is_kept_however_often_a_run_is_extended(seeds: range) -> None:
    resumed = 0
    for seed in seeds:
        runtime = extended(seed)
        replayed = Orchestrator(runtime.config)
        for event, now, commands in runtime.log:
            resumed += isinstance(event, e.StepsChanged) and replayed.finished
            assert replayed.step(event, now) == commands
    assert resumed, "some were asked for more when they had finished"


def batches(runtime: ChaosRuntime) -> dict[int, tuple[int, ...]]:
    return {
        command.step: command.groups
        for _, _, commands in runtime.log
        for command in commands
        if isinstance(command, c.Apply)
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_synchronous_run_that_is_extended_trains_the_batches_of_a_longer_one(seed: int) -> None:
    longer = begin(seed, steps=100, mode="sync", faults=0)
    longer.run()
    shorter = begin(seed, steps=2, mode="sync", faults=0)
    until(shorter, 100_000)
    assert len(batches(shorter)) <= 2
    shorter.deliver(e.StepsChanged(steps=100))
    shorter.run()
    assert batches(shorter) == batches(longer)


@pytest.mark.parametrize("asked", [None, 3])
def test_fewer_steps_are_refused_and_a_refusal_changes_nothing(asked: int | None) -> None:
    config = draw_config(random.Random(0)).model_copy(update={"steps": asked})
    orchestrator = Orchestrator(config)
    before = orchestrator.snapshot()
    with pytest.raises(UserError, match="fewer than the run was asked for"):
        orchestrator.step(e.StepsChanged(steps=2), 0)
    assert orchestrator.snapshot() == before


# -- the audit --------------------------------------------------------------------------------------------------


def audit_problems(runtime: ChaosRuntime, steps: int | None) -> list[str]:
    """What the auditor says about the steps of a log, if the run was asked for so many at the start."""
    config = runtime.config
    terms = Terms(config.groups_per_step, config.group_size, 64, config.mode_spec.mixes_versions, steps)
    auditor = Auditor(terms)
    for seq, (event, now, commands) in enumerate(runtime.log, 1):
        auditor.observe(LoggedEvent(seq, now, event, commands))
    return [one for one in [*auditor.problems, *auditor.final_problems()] if "asked for" in one]


def test_the_audit_counts_steps_by_what_was_asked_for_at_the_time() -> None:
    runtime = begin(5, steps=2, mode="sync", faults=0)
    until(runtime, 100_000)
    assert len(batches(runtime)) == 2
    assert audit_problems(runtime, 2) == []
    assert audit_problems(runtime, 1) == ["2 steps were trained, and 1 were asked for"]
    runtime.deliver(e.StepsChanged(steps=3))
    until(runtime, 100_000)
    assert len(batches(runtime)) == 3
    assert audit_problems(runtime, 2) == []
    assert audit_problems(runtime, 1) == ["2 steps were trained, and 1 were asked for"]
    assert audit_problems(runtime, 4) == ["3 steps are asked for, fewer than before"]
    assert audit_problems(runtime, None) == ["3 steps are asked for, fewer than before"]
