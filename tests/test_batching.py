"""The step rule: with it nothing ever misses its deadline, and it is no stricter than it must be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.control.batching import StepRule


def feasible(untrained: Counter[int], step: int, size: int, staleness: int) -> bool:
    """For every d >= step: the groups with deadline <= d fit into the steps step .. d."""
    return all(
        sum(count for version, count in untrained.items() if version + staleness <= d) <= (d - step + 1) * size
        for d in range(step, step + staleness + 1)
    )


def left_behind_fits(untrained: Counter[int], batch: Counter[int], step: int, size: int, staleness: int) -> bool:
    left = untrained - batch
    return not any(version + staleness <= step for version in left) and feasible(left, step + 1, size, staleness)


states = st.tuples(
    st.integers(0, 4),  # staleness
    st.integers(1, 4),  # size
    st.lists(st.integers(0, 6), min_size=5, max_size=5),  # groups by age
)


@given(states, st.randoms(use_true_random=False))
def test_what_the_rule_lets_in_always_leaves_a_feasible_rest(state, random) -> None:  # type: ignore[no-untyped-def]
    """Whatever finishes in whatever order: once the batch is full, the rest can still be trained in time."""
    staleness, size, ages = state
    step = 10
    untrained = Counter({step - age: count for age, count in enumerate(ages[: staleness + 1]) if count})
    if not feasible(untrained, step, size, staleness):
        return
    rule = StepRule(step, size, staleness)
    finishing = list(untrained.elements())
    random.shuffle(finishing)
    batch: Counter[int] = Counter()
    waiting: list[int] = []
    for version in finishing:
        waiting.append(version)
        waiting.sort()
        while waiting and rule.count < size and rule.blocker(waiting[0], untrained) is None:
            rule.take(waiting[0])
            batch[waiting.pop(0)] += 1
    # All have finished, so the step must be full, or have taken all there is.
    assert rule.count == min(size, untrained.total())
    assert left_behind_fits(untrained, batch, step, size, staleness)


def test_fast_young_groups_do_not_take_the_room_of_slow_old_ones() -> None:
    """K = 2, B = 1: three old groups unfinished, deadlines all at 12; a fast new one must wait."""
    untrained = Counter({8: 1, 9: 1, 10: 1})
    rule = StepRule(10, 1, 2)
    assert rule.blocker(10, untrained) is not None
    assert rule.blocker(9, untrained) is not None
    assert rule.blocker(8, untrained) is None


def test_the_bound_cannot_be_broken() -> None:
    rule = StepRule(10, 4, 2)
    with pytest.raises(AssertionError, match="bound"):
        rule.take(7)


def test_with_room_to_spare_young_groups_are_welcome() -> None:
    rule = StepRule(10, 4, 2)
    assert rule.blocker(10, Counter({10: 6, 9: 2})) is None
