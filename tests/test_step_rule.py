"""The step rule: no group ever misses its deadline, and the rule is no stricter than that needs."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.types import Prompt
from dora_rl.orchestrator.group_table import GroupStage, GroupTable
from dora_rl.orchestrator.instances import SlotState
from dora_rl.orchestrator.modes import Streaming
from dora_rl.orchestrator.step_rule import StepRule


def feasible(untrained: Counter[int], step: int, size: int) -> bool:
    """For every d >= step: the groups with deadline <= d fit into the steps step .. d."""
    return all(
        sum(count for deadline, count in untrained.items() if deadline <= d) <= (d - step + 1) * size
        for d in range(step, max(untrained, default=step) + 1)
    )


def left_behind_fits(untrained: Counter[int], batch: Counter[int], step: int, size: int) -> bool:
    left = untrained - batch
    return not any(deadline <= step for deadline in left) and feasible(left, step + 1, size)


states = st.tuples(
    st.integers(0, 4),  # staleness
    st.integers(1, 4),  # size
    st.lists(st.integers(0, 6), min_size=5, max_size=5),  # groups by steps to their deadline
)


@given(states, st.randoms(use_true_random=False))
def test_the_groups_left_behind_are_always_feasible(state, random) -> None:  # type: ignore[no-untyped-def]
    """In whatever order groups finish: once the batch is full, the other groups can still be trained in time."""
    staleness, size, left = state
    step = 10
    untrained = Counter({step + steps: count for steps, count in enumerate(left[: staleness + 1]) if count})
    if not feasible(untrained, step, size):
        return
    rule = StepRule(step, size)
    finishing = list(untrained.elements())
    random.shuffle(finishing)
    batch: Counter[int] = Counter()
    waiting: list[int] = []
    for deadline in finishing:
        waiting.append(deadline)
        waiting.sort()
        while waiting and rule.count < size and rule.blocker(waiting[0], untrained) is None:
            rule.take(waiting[0])
            batch[waiting.pop(0)] += 1
    # All have finished, so the step must be full, or have taken all groups.
    assert rule.count == min(size, untrained.total())
    assert left_behind_fits(untrained, batch, step, size)


def test_fast_young_groups_do_not_take_the_room_of_slow_old_ones() -> None:
    """K = 2, B = 1: three old groups are unfinished, one for each step to come, so a fast new one must wait."""
    untrained = Counter({10: 1, 11: 1, 12: 1})
    rule = StepRule(10, 1)
    assert rule.blocker(12, untrained) is not None
    assert rule.blocker(11, untrained) is not None
    assert rule.blocker(10, untrained) is None


def test_a_group_past_its_deadline_is_never_taken() -> None:
    rule = StepRule(10, 4)
    with pytest.raises(AssertionError, match="bound"):
        rule.take(9)


def test_young_groups_are_taken_while_there_is_room_for_the_older_ones() -> None:
    rule = StepRule(10, 4)
    assert rule.blocker(12, Counter({12: 6, 11: 2})) is None


changes = st.lists(
    st.one_of(
        st.tuples(st.just("bound"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["finish", "end without signal"]), st.integers(0, 40)),
    )
)


@given(st.integers(1, 3), st.integers(0, 4), changes)
def test_no_deadline_is_missed_and_nothing_stalls_while_the_bound_changes(size, staleness, actions) -> None:  # type: ignore[no-untyped-def]
    """Admission, step rule, changes of the bound and groups that are replaced keep the state feasible, in any order."""
    policy = Streaming(groups_per_step=size, staleness=staleness)
    groups = GroupTable(group_size=2, min_survivors=1, replaceable=10**9)
    step, rule, batch = 0, StepRule(0, size), []
    for what, number in [*actions, *[("finish", 0)] * 100]:
        if what == "bound":
            policy.change_bound(number)
        while policy.allowance(groups) > 0:
            groups.admit(Prompt(key="p", tokens=1), step, step + policy.staleness, cast("SlotState", None), 0)
        running = [group for group in groups.by_id.values() if group.stage is GroupStage.OPEN]
        if what != "bound" and running:
            for sibling, trajectory in enumerate(running[number % len(running)].trajectories):
                groups.generated(trajectory, 1)
                groups.scored(trajectory, reward=float(sibling) if what == "finish" else 1.0)
        while rule.count < size and (ready := groups.ready_deadlines()) and rule.blocker(ready[0], groups.due) is None:
            rule.take(ready[0])
            batch.append(groups.take(ready[0], step))  # asserts that the group keeps its own bound
        assert feasible(Counter(groups.due), step, size)
        if rule.count == size:
            for group in batch:
                groups.mark_trained(group)
            step, batch = step + 1, []
            rule = StepRule(step, size)
    assert step >= 100 // size - 5 - 1  # at most 5 batches are in flight when the last 100 groups begin to finish
