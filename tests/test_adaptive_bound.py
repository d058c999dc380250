"""`max_staleness = "auto"`: where the bound settles in simple worlds, and what it never does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.core.interfaces import drive
from dora_rl.orchestrator.adaptive_bound import FLOOR, AdaptiveBound, StepMeasures
from dora_rl.orchestrator.bound_control import BoundControl
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.invariants import InvariantChecker
from dora_rl.sim.presets import preset
from dora_rl.sim.run import MeasuredRuntime, control_for, parse_variant, simulate

TOKENS = 1000
CAP = 8


@dataclass(frozen=True, kw_only=True)
class World:
    """What a step of a run measures under each bound; a new bound shows after as many steps as groups may wait."""

    seconds: Callable[[int], float]
    busy: float = 10.0
    """Seconds of a step that the trainer works."""
    ess: Callable[[int], float | None] = lambda _: None
    kl: Callable[[int], float | None] = lambda _: None

    def step(self, bound: int) -> StepMeasures:
        seconds = self.seconds(bound)
        waited = max(0.0, seconds - self.busy)
        return StepMeasures(seconds=seconds, waited=waited, tokens=TOKENS, ess=self.ess(bound), kl=self.kl(bound))


def bounds(world: World, steps: int, adaptive: AdaptiveBound | None = None) -> list[int]:
    """The bound after each step."""
    adaptive = adaptive or AdaptiveBound(FLOOR, CAP)
    effective, found = [adaptive.bound] * (CAP + 1), []
    for _ in range(steps):
        # Groups of the largest bound of late are still trained; a larger one takes effect as they are replaced.
        adaptive.observe(world.step(round(sum(effective[-adaptive.bound :]) / adaptive.bound)))
        effective.append(adaptive.bound)
        found.append(adaptive.bound)
    return found


def stragglers(longest: float, busy: float = 10.0) -> Callable[[int], float]:
    """A step takes as long as the trainer works, or as the longest trajectory within K + 1 steps."""
    return lambda bound: max(busy, longest / (bound + 1))


TRAINER_BOUND = World(seconds=lambda _: 10.0)
ROLLOUT_BOUND = World(seconds=lambda _: 20.0)


# -- where it settles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 3, 8])
def test_a_trainer_that_never_waits_gets_the_freshest_groups(first: int) -> None:
    found = bounds(TRAINER_BOUND, 500, AdaptiveBound(first, CAP))
    assert set(found[-300:]) == {FLOOR}


def test_more_staleness_is_not_taken_if_it_gains_nothing() -> None:
    """Rollout is the slower side whatever the bound is: trials become rare, and each is undone."""
    found = bounds(ROLLOUT_BOUND, 1000)
    assert max(found) == FLOOR + 1
    assert found.count(FLOOR) > 800


@pytest.mark.parametrize("enough", [2, 3, 5, 8])
def test_stragglers_raise_the_bound_until_the_trainer_no_longer_waits(enough: int) -> None:
    found = bounds(World(seconds=stragglers(10.0 * (enough + 1))), 600)
    assert max(found) == enough
    assert found[200:].count(enough) > 300, "mostly, up to trials of a smaller bound"


def test_the_cap_holds() -> None:
    found = bounds(World(seconds=stragglers(1000.0)), 600, AdaptiveBound(FLOOR, 4))
    assert found[-1] == max(found) == 4


def test_a_gain_below_two_percent_is_not_worth_a_larger_bound() -> None:
    for gain, settled in ((0.01, 1), (0.04, CAP)):
        found = bounds(World(seconds=lambda bound, gain=gain: 40.0 / (1 + gain) ** bound), 1000)  # type: ignore[misc]
        assert max(found[-40:], key=found[-40:].count) == settled, gain


def test_what_counts_is_speed_times_effective_sample_size() -> None:
    """Each K makes steps 20% faster. If it costs 30% of the effective samples it is not worth it, if 5%, it is."""
    for cost, settled in ((0.30, FLOOR), (0.05, CAP)):
        world = World(
            seconds=lambda bound: 100.0 / 1.2**bound,
            busy=1.0,
            ess=lambda bound, cost=cost: (1 - cost) ** bound,  # type: ignore[misc]
        )
        found = bounds(world, 600)
        assert max(found[300:], key=found[300:].count) == settled, cost


def test_a_divergence_stands_in_for_the_effective_sample_size() -> None:
    """exp(-2 * KL): 0.2 per K costs a third of the samples, and 0.01 costs 2%."""
    for kl, settled in ((0.2, FLOOR), (0.01, CAP)):
        world = World(seconds=lambda bound: 100.0 / 1.2**bound, busy=1.0, kl=lambda bound, kl=kl: kl * bound)  # type: ignore[misc]
        found = bounds(world, 600)
        assert max(found[300:], key=found[300:].count) == settled, kl


def test_unstable_learning_keeps_the_bound_small() -> None:
    """Steps are ever faster, but at K = 3 the samples are useless."""
    world = World(seconds=lambda bound: 100.0 / 1.5**bound, busy=1.0, ess=lambda bound: 0.9 if bound < 3 else 0.2)
    found = bounds(world, 800)
    assert max(found) == 3
    assert found[-500:].count(3) < 20
    assert found[-200:].count(2) > 100


# -- alarms -------------------------------------------------------------------------------------------------------


def settled(bound: int, ess: float | None, kl: float | None = 0.02) -> AdaptiveBound:
    """A run that has been under a bound for a while, and neither waits nor hardly waits."""
    adaptive = AdaptiveBound(bound, CAP)
    for _ in range(40):
        assert adaptive.observe(calm(ess, kl)) is None
    return adaptive


def calm(ess: float | None, kl: float | None = 0.02) -> StepMeasures:
    return StepMeasures(seconds=10.0, waited=0.3, tokens=TOKENS, ess=ess, kl=kl)


@pytest.mark.parametrize("healthy", [1.0, 0.4])
@pytest.mark.parametrize("bound", range(2, CAP + 1))
def test_a_low_effective_sample_size_halves_the_bound_at_once(healthy: float, bound: int) -> None:
    assert settled(bound, healthy).observe(calm(0.51 * healthy)) is None
    adaptive = settled(bound, healthy)
    assert adaptive.observe(calm(0.49 * healthy)) == bound // 2
    for _ in range(bound + 1):  # groups of the larger bound are still trained
        assert adaptive.observe(calm(0.1 * healthy)) is None
    assert adaptive.observe(calm(0.1 * healthy)) == (None if bound // 2 == FLOOR else bound // 4)


def test_an_effective_sample_size_that_is_not_a_number_is_low() -> None:
    assert settled(4, 0.9).observe(calm(float("nan"))) == 2


def test_a_jump_of_the_divergence_halves_the_bound_at_once() -> None:
    assert settled(4, 0.9, kl=0.02).observe(calm(0.9, kl=0.059)) is None
    assert settled(4, 0.9, kl=0.02).observe(calm(0.9, kl=0.061)) == 2
    assert settled(4, 0.9, kl=0.001).observe(calm(0.9, kl=0.009)) is None, "below the noise"
    assert settled(4, 0.9, kl=0.001).observe(calm(0.9, kl=0.011)) == 2


def test_an_alarm_ends_a_trial() -> None:
    adaptive = AdaptiveBound(2, CAP)
    raised = next(bound for _ in range(40) if (bound := adaptive.observe(ROLLOUT_BOUND.step(2))))
    assert raised == 3
    low = StepMeasures(seconds=1.0, waited=0.0, tokens=TOKENS, ess=0.1)
    assert adaptive.observe(low) == 1
    assert bounds(TRAINER_BOUND, 100, adaptive) == [1] * 100, "the trial of 3 is over"


def test_after_alarms_the_same_bound_is_tried_ever_more_rarely() -> None:
    """Steps are ever faster, but at K = 3 there is an alarm in each step."""
    adaptive, tried = AdaptiveBound(FLOOR, CAP), []
    for step in range(1000):
        bound = adaptive.bound
        ess = 0.2 if bound == 3 else 1.0
        if adaptive.observe(StepMeasures(seconds=100.0 / 1.5**bound, waited=5.0, tokens=TOKENS, ess=ess)) == 3:
            tried.append(step)
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert len(tried) >= 4
    assert pauses[-1] >= 256
    assert all(after >= before for before, after in itertools.pairwise(pauses))


def test_a_larger_bound_requires_healthy_samples() -> None:
    """0.6 of what is healthy is no alarm, but no reason for more staleness either."""
    for share, raised in ((0.6, False), (0.8, True)):
        adaptive = settled(4, 1.0)
        assert [adaptive.observe(calm(share)) for _ in range(30)] == [None] * 30
        waiting = StepMeasures(seconds=20.0, waited=10.0, tokens=TOKENS, ess=share)
        assert any(adaptive.observe(waiting) == 5 for _ in range(60)) is raised, share


def test_under_the_least_bound_what_is_measured_is_healthy() -> None:
    """No bound is smaller, so there is no alarm: a run whose samples got worse for good goes on from there."""
    adaptive = settled(FLOOR, 1.0)
    assert [adaptive.observe(calm(0.3)) for _ in range(30)] == [None] * 30
    waiting = StepMeasures(seconds=20.0, waited=10.0, tokens=TOKENS, ess=0.3)
    assert any(adaptive.observe(waiting) == FLOOR + 1 for _ in range(10))


# -- what it never does -------------------------------------------------------------------------------------------

NUMBERS = st.floats(0.0, 1e6)
ANY_STEP = st.builds(
    StepMeasures,
    seconds=NUMBERS,
    waited=NUMBERS,
    tokens=st.integers(0, 10**9),
    ess=st.none() | st.floats(0.0, 1.0, exclude_min=True),
    kl=st.none() | st.floats(-1.0, 100.0),
)


@given(st.integers(0, 70), st.integers(FLOOR, 12), st.lists(ANY_STEP | st.none(), max_size=200))
def test_the_bound_stays_in_its_range_and_moves_by_one_or_half(
    first: int, cap: int, steps: list[StepMeasures | None]
) -> None:
    adaptive = AdaptiveBound(first, cap)
    for step in steps:
        before = adaptive.bound
        if step is None:
            adaptive.interrupt()
            continue
        changed = adaptive.observe(step)
        assert changed == (None if adaptive.bound == before else adaptive.bound)
        assert FLOOR <= adaptive.bound <= cap
        assert abs(adaptive.bound - before) <= 1 or adaptive.bound == before // 2


@given(
    st.integers(FLOOR, CAP),
    st.floats(0.1, 100.0),
    st.floats(0.0, 1.0),
    st.none() | st.floats(0.01, 1.0),
    st.none() | st.floats(0.0, 1.0),
)
def test_constant_steps_give_a_constant_bound_up_to_rare_trials(
    first: int, seconds: float, share: float, ess: float | None, kl: float | None
) -> None:
    """No staleness helps: the bound falls to the least one if the trainer never waits, and other trials are rare."""
    same = StepMeasures(seconds=seconds, waited=share * seconds, tokens=TOKENS, ess=ess, kl=kl)
    adaptive = AdaptiveBound(first, CAP)
    changes = [step for step in range(2000) if adaptive.observe(same) is not None]
    assert len(changes) <= (first - FLOOR) + 22
    late = [step for step in changes if step >= 1000]
    assert len(late) <= 8


@given(st.lists(ANY_STEP, max_size=60), st.integers(FLOOR, 4), st.integers(FLOOR, CAP))
def test_the_same_steps_give_the_same_bounds(steps: list[StepMeasures], first: int, cap: int) -> None:
    one, other = AdaptiveBound(first, cap), AdaptiveBound(first, cap)
    assert [one.observe(step) for step in steps] == [other.observe(step) for step in steps]


def test_an_interruption_begins_the_window_again() -> None:
    adaptive = AdaptiveBound(FLOOR, CAP)
    for _ in range(60):
        for _ in range(11):
            assert adaptive.observe(ROLLOUT_BOUND.step(1)) is None
        adaptive.interrupt()
    assert [adaptive.observe(ROLLOUT_BOUND.step(1)) for _ in range(12)] == [None] * 11 + [2]


# -- how steps are measured ---------------------------------------------------------------------------------------


class Recorded(BoundControl):
    """Keeps what it measures and changes nothing."""

    def __init__(self, config: ControlConfig) -> None:
        super().__init__(config, FLOOR)
        self.steps: list[StepMeasures] = []
        self._adaptive.observe = lambda step: self.steps.append(step)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["workload.reward_seconds=3"],
        ["trainer.utilisation=0.1"],
        ["workload.no_signal=0.5", "control.dynamic_sampling=10"],
    ],
)
def test_waiting_time_and_tokens_agree_with_the_accounts_of_the_simulator(settings: list[str]) -> None:
    config = preset("laptop", ["steps=20", "warmup_steps=0", *settings])
    variant = parse_variant("dora:k2")
    control = control_for(config, variant)
    runtime = MeasuredRuntime(
        config.model_copy(update={"control": control}), config.layouts["dora"], keep_segments=False, progress=None
    )
    measured = runtime._bound_control = Recorded(control)
    drive(Orchestrator(control), runtime)
    runtime.close()
    result = runtime.result(variant, config.layouts["dora"])
    assert [step.tokens for step in measured.steps] == [
        record.tokens for _, record in sorted(runtime.records.steps.items()) if record.finished_at
    ][: len(measured.steps)]
    assert len(measured.steps) >= 19
    ended = len({number // control.group_size for number in measured._lengths})
    assert ended <= (control.staleness + 1) * control.groups_per_step, "lengths of groups that are gone are kept"
    whole = sum(step.seconds for step in measured.steps)
    waited = sum(step.waited for step in measured.steps)
    causes = ("idle: rollout", "idle: deadline", "idle: reward")
    total = result.step_seconds * result.steps
    assert waited == pytest.approx(total * sum(result.trainer.get(cause, 0.0) for cause in causes), rel=0.02)
    assert whole == pytest.approx(total, rel=0.02)


# -- in simulations -----------------------------------------------------------------------------------------------

AUTO = ["control.max_staleness=auto"]


def test_a_simulated_cluster_finds_its_bound() -> None:
    """Rollout and training of `laptop` are about balanced: K = 3 is much faster than 1. A slow trainer needs 1."""
    balanced = simulate(preset("laptop", ["steps=75", *AUTO]), parse_variant("dora"))
    assert balanced.bounds[0] == (0, FLOOR)
    assert max(bound for _, bound in balanced.bounds) >= 3
    slow = simulate(preset("laptop", ["steps=40", "trainer.utilisation=0.1", *AUTO]), parse_variant("dora"))
    assert slow.bounds == ((0, FLOOR),)
    assert slow.bound == FLOOR


class Checked(MeasuredRuntime):
    """Checks the promises at every event of a simulation."""

    checker: InvariantChecker
    orchestrator: Orchestrator

    def execute(self, commands: object) -> None:
        answered = list(commands)  # type: ignore[call-overload]
        self.checker.observe(self._current, answered)
        super().execute(answered)


def test_every_group_keeps_the_bound_under_which_it_was_admitted() -> None:
    config = preset("laptop", ["steps=60", *AUTO])
    control = control_for(config, parse_variant("dora"))
    runtime = Checked(
        config.model_copy(update={"control": control}), "disaggregated", keep_segments=False, progress=None
    )
    runtime.checker = InvariantChecker(control)
    drive(Orchestrator(control), runtime)
    assert len(set(runtime.checker.bounds)) > 1
    assert max(runtime.checker.staleness) > FLOOR


def test_the_bound_never_exceeds_the_configured_cap() -> None:
    """`control.max_staleness_cap`."""
    config = preset("laptop", ["steps=60", "control.max_staleness_cap=2", *AUTO])
    result = simulate(config, parse_variant("dora"))
    assert max(bound for _, bound in result.bounds) == 2
    assert max(result.staleness) <= 2


def test_modes_that_keep_their_bound_refuse_auto() -> None:
    with pytest.raises(ConfigError, match=r"'control.max_staleness' can't be \"auto\" in mode 'partial'.*partial:kN"):
        simulate(preset("laptop", AUTO), parse_variant("partial"))
    short = preset("laptop", ["steps=2", *AUTO])
    assert max(simulate(short, parse_variant("partial:k2")).staleness) <= 2
    assert set(simulate(short, parse_variant("sync")).staleness) == {0}


# -- the setting --------------------------------------------------------------------------------------------------

REQUIRED = {"groups_per_step": 2, "group_size": 2, "max_response_tokens": 8}


def wrong() -> Iterator[tuple[dict[str, object], str]]:
    number = 'must be an integer from 0 to 64, or "auto"'
    yield {"max_staleness": "automatic"}, number
    yield {"max_staleness": -1}, number
    yield {"max_staleness": 65}, number
    yield {"max_staleness": 1.5}, number
    for mode in ("sync", "one_step_off", "partial"):
        yield {"max_staleness": "auto", "mode": mode}, f"can't be \"auto\" in mode '{mode}'"
    yield {"max_staleness": "auto", "max_staleness_cap": 0}, "'max_staleness_cap'"


@pytest.mark.parametrize(("given", "sentence"), list(wrong()))
def test_a_bound_that_makes_no_sense_is_refused_in_one_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(ControlConfig, REQUIRED | given)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_auto_starts_with_the_least_bound_and_makes_room_for_the_cap() -> None:
    config = build(ControlConfig, REQUIRED | {"max_staleness": "auto", "max_staleness_cap": 5})
    assert (config.adaptive, config.staleness, config.largest_staleness) == (True, FLOOR, 5)
    assert build(ControlConfig, config.model_dump(mode="json")) == config
    fixed = build(ControlConfig, REQUIRED | {"max_staleness": 3, "max_staleness_cap": 5})
    assert (fixed.adaptive, fixed.staleness, fixed.largest_staleness) == (False, 3, 3)
