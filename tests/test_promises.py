"""The promises, under thousands of schedules with faults at any point.

`ChaosRuntime` injects every fault that the contract allows, and `InvariantChecker` raises on the first promise that
does not hold: single version (C1), exactly once (C2), staleness (C3), no slot idle without need, no stall, everything
accounted for at the end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dora_rl.core.commands import Move
from dora_rl.orchestrator.config import ControlConfig, ModeName
from dora_rl.orchestrator.group_table import GroupTable
from dora_rl.orchestrator.instances import InstanceTable
from dora_rl.orchestrator.modes import MODES, Barrier, ModeSpec
from dora_rl.orchestrator.placement import PLACEMENT_RULES, PlacementFacts, PlacementRule, Targets
from dora_rl.orchestrator.request_scheduler import RequestScheduler
from dora_rl.orchestrator.trainer_state import TrainerState
from dora_rl.sim.chaos import ChaosPlan, ChaosRuntime
from tests.schedules import DEADLINES, draw_config, draw_plan, run_schedule

BLOCKS = 32
PER_BLOCK = 100


@pytest.mark.parametrize("block", range(BLOCKS))
def test_promises_hold_under_random_faults(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        run_schedule(seed)


def test_schedules_reach_every_kind_of_fault_and_decision() -> None:
    """A test that can't fail proves nothing: the schedules must move, resume, retrain and fail things."""
    runtimes = [run_schedule(seed) for seed in range(300)]
    faults = set().union(*(runtime.faults for runtime in runtimes))
    assert len(faults) >= 15
    assert sum(runtime.checker.moves for runtime in runtimes) > 100
    assert sum(runtime.checker.resumed for runtime in runtimes) > 100
    assert sum(len(runtime.checker.failed) for runtime in runtimes) > 10
    assert sum(len(runtime.checker.without_signal) for runtime in runtimes) > 200
    assert max(lag for runtime in runtimes for lag in runtime.checker.staleness) >= 3
    # A smaller bound is met by waiting: some groups were trained later than a group admitted then might have been.
    kept = sum(
        step - runtime.checker.admitted[group][1] > min(runtime.checker.bounds[group:])
        for runtime in runtimes
        for group, step in runtime.checker.trained.items()
    )
    assert kept > 10


@pytest.mark.parametrize(
    ("state", "method"),
    [
        (GroupTable, "generated"),
        (GroupTable, "mark_trained"),
        (GroupTable, "scored"),
        (InstanceTable, "place"),
        (InstanceTable, "end_load"),
        (RequestScheduler, "start"),
        (TrainerState, "collect"),
    ],
)
def test_a_counter_that_is_wrong_is_noticed_at_once(state: type, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chaos calls `Orchestrator.check` after every event: if one of these methods miscounts, a schedule fails."""
    original = getattr(state, method)

    def miscounting(self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        match self:
            case GroupTable():
                self.running += method == "generated"
                self.trained += method == "mark_trained"
                self.without_signal += method == "scored"
            case InstanceTable():
                next(iter(self.by_id.values())).active += method == "place"
                self.sharing += method == "end_load"
            case RequestScheduler():
                self.requests[0] = self.requests.get(0, 0) + 1
            case TrainerState():
                self._sent += 1 + len(self._batch)
        return result

    monkeypatch.setattr(state, method, miscounting)
    with pytest.raises(AssertionError) as failure:
        run_schedule(3)
    assert "check" in failure.traceback[-1].name


class Schedules(RuleBasedStateMachine):
    """The same runtime, with hypothesis choosing what happens next and shrinking what goes wrong."""

    runtime: ChaosRuntime

    @initialize(
        mode=st.sampled_from(["dora", "dora", "dora", "sync", "one_step_off", "partial"]),
        staleness=st.integers(0, 3),
        batch=st.integers(1, 3),
        size=st.integers(1, 2),
        instances=st.integers(1, 4),
        slots=st.integers(1, 2),
        prompts=st.integers(1, 16),
        placement=st.sampled_from(["deadline", "proportional"]),
        shares=st.booleans(),
        sampling=st.integers(0, 2),
        choices=st.randoms(use_true_random=False),
    )
    def start(  # type: ignore[no-untyped-def]
        self, mode, staleness, batch, size, instances, slots, prompts, placement, shares, sampling, choices
    ) -> None:
        config = ControlConfig(
            mode=mode,
            max_staleness=staleness,
            groups_per_step=batch,
            group_size=size,
            max_response_tokens=64,
            placement=placement,
            dynamic_sampling=sampling if size > 1 else 0,
            rebalance_seconds=5,
            deadlines=DEADLINES,
        )
        plan = ChaosPlan(
            instances=instances,
            slots=slots,
            max_requests=2 * size,
            prompts=prompts,
            faults=8,
            shares_trainer=shares,
            tools=True,
            no_signal=0.5,
        )
        self.runtime = ChaosRuntime(config, plan, lambda below: choices.randrange(below) if below > 1 else 0)

    @property
    def unfinished(self) -> bool:
        return hasattr(self, "runtime") and not self.runtime.orchestrator.finished

    @rule(times=st.integers(1, 12))
    def something_happens(self, times: int) -> None:
        for _ in range(times):
            self.runtime.act(faults=False)

    @precondition(lambda self: self.unfinished)
    @rule()
    def time_passes(self) -> None:
        self.runtime.skip_to_timer()

    @precondition(lambda self: self.unfinished and self.runtime.faults_left > 0)
    @rule(kind=st.sampled_from(sorted(ChaosRuntime.FAULTS)))
    def something_breaks(self, kind: str) -> None:
        self.runtime.inject(kind)

    def teardown(self) -> None:
        if hasattr(self, "runtime"):
            self.runtime.run()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_same_schedule_gives_the_same_run() -> None:
    first, second = run_schedule(7), run_schedule(7)
    assert first.checker.batches == second.checker.batches
    assert first.events == second.events


@pytest.mark.parametrize("seed", range(40))
def test_staleness_zero_gives_the_batches_of_sync(seed: int) -> None:
    """Without faults that change the data, K = 0 trains the same batches as `sync`, step for step."""
    batches = []
    modes: tuple[ModeName, ...] = ("sync", "dora")
    for mode in modes:
        config = ControlConfig(
            mode=mode,
            max_staleness=0,
            groups_per_step=3,
            group_size=2,
            max_response_tokens=64,
            deadlines=DEADLINES,
        )
        plan = ChaosPlan(instances=1 + seed % 4, slots=1 + seed % 2, max_requests=4, prompts=17, faults=0)
        random_ = random.Random(f"{mode}{seed}")
        runtime = ChaosRuntime(config, plan, lambda below, random_=random_: int(random_.random() * below))  # type: ignore[misc]
        runtime.run()
        batches.append(
            {step: [runtime.checker.admitted[g] for g in groups] for step, groups in runtime.checker.batches.items()}
        )
    assert batches[0] == batches[1]


@pytest.mark.parametrize("one_batch", [True, False])
def test_nothing_moves_where_one_batch_serves_every_version(one_batch: bool) -> None:
    """Adapters over one base: with a slot for each version on every instance there is nothing to rebalance."""
    moved = 0
    for seed in range(20):
        random_ = random.Random(seed)
        config = draw_config(random_, "dora")
        plan = ChaosPlan(
            instances=3,
            slots=config.staleness + 1,
            max_requests=3 * config.group_size,
            prompts=40,
            faults=0,
            one_batch=one_batch,
        )
        runtime = ChaosRuntime(config, plan, lambda below, random_=random_: int(random_.random() * below))  # type: ignore[misc]
        runtime.run()
        moved += sum(isinstance(command, Move) for _, _, commands in runtime.log for command in commands)
    assert (moved == 0) == one_batch, "with a batch for each slot it pays to gather a version on fewer instances"


def test_a_new_mode_is_one_row_and_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "two_steps_off", ModeSpec(policy=Barrier, bound=2))
    runtimes = [run_schedule(seed, "two_steps_off") for seed in range(40)]
    assert max(lag for runtime in runtimes for lag in runtime.checker.staleness) == 2


def test_a_new_placement_rule_is_one_row_and_keeps_the_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_slot_each(facts: PlacementFacts) -> Targets:
        return {old.version: 1 for old in facts.old}

    monkeypatch.setitem(PLACEMENT_RULES, "one_slot_each", PlacementRule(targets=one_slot_each, consolidates=True))
    for seed in range(40):
        random_ = random.Random(seed)
        config = ControlConfig.model_validate(
            draw_config(random_, "dora").model_dump() | {"placement": "one_slot_each"}
        )
        ChaosRuntime(config, draw_plan(random_, config), random_.randrange).run()
