"""The times of all labels add up to the lifetime exactly, in an account and in simulations of every mode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.interfaces import drive
from dora_rl.core.time_accounting import Activity, TimeAccount
from dora_rl.orchestrator.modes import MODES, LayoutKind
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.presets import preset
from dora_rl.sim.run import control_for, parse_variant
from dora_rl.sim.runtime import SimRuntime

IDLE = Activity(ActivityLabel.IDLE, None, IdleCause(reason=IdleReason.STARTING))
ACTIVITIES = [
    IDLE,
    Activity(ActivityLabel.DECODE, 1),
    Activity(ActivityLabel.DECODE, 2),
    Activity(ActivityLabel.LOAD, 2),
]


@given(st.lists(st.tuples(st.integers(0, 10**12), st.sampled_from(ACTIVITIES))))
def test_totals_add_up_to_the_lifetime(changes: list[tuple[int, Activity]]) -> None:
    account = TimeAccount(5, IDLE, keep_segments=True)
    now = 5
    for later, activity in changes:
        now += later
        account.switch(now, activity)
    account.settle(now)
    assert account.lifetime == now - 5 == sum(account.totals.values()) == sum(account.by_label().values())
    assert account.segments is not None
    assert sum(segment.end - segment.start for segment in account.segments) == account.lifetime


def test_time_does_not_run_backwards() -> None:
    account = TimeAccount(10, IDLE)
    with pytest.raises(AssertionError, match="backwards"):
        account.settle(9)


@pytest.mark.parametrize("text", [*MODES, "dora:elastic", "dora:proportional"])
@pytest.mark.parametrize("slots", [1, 3])
def test_every_slot_second_and_trainer_second_has_one_label(text: str, slots: int) -> None:
    config = preset(
        "laptop",
        [f"rollout.slots={slots}", "steps=4", "warmup_steps=2", "workload.turns=2", "workload.tool_seconds=0.1"],
    )
    variant = parse_variant(text)
    control = control_for(config, variant)
    layout: LayoutKind = "elastic" if variant.elastic else config.layouts[variant.mode]
    runtime = SimRuntime(config.model_copy(update={"control": control}), layout)
    drive(Orchestrator(control), runtime)
    runtime.close()
    accounts = [slot.account for instance in runtime.instances.values() for slot in instance.slot_list]
    for account in [*accounts, runtime.trainer]:
        assert sum(account.totals.values()) == account.lifetime == runtime.now
        for activity in account.totals:
            assert (activity.label is ActivityLabel.IDLE) == (activity.cause is not None)
