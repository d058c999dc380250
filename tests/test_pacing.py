"""Just-in-time admission: as few groups as keep the trainer from waiting, and more while it waits, by a timer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import IdleReason
from dora_rl.core.types import SECOND, InstanceSpec, Nanoseconds, Prompt, SlotId
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.orchestrator.pacing import Pacing, _deviations_for
from dora_rl.sim.fake_engine import fingerprint
from dora_rl.sim.presets import preset
from dora_rl.sim.run import Result, parse_variant, simulate


def pacing(batch: int, step: float, carry_over: float, began: Nanoseconds = 0) -> Pacing:
    made = Pacing(batch)
    made.record_latency(SECOND)
    made.end_step(step, 3)
    made.begin_step(began)
    made.carry_over = carry_over
    return made


def waiting(made: Pacing, waited: Nanoseconds, now: Nanoseconds, *, waits: bool) -> Pacing:
    """The trainer has waited this long at the beginning of the step, and waits again, or not, from `now` on."""
    made.trainer_waits(made._began, waits=True)
    made.trainer_waits(made._began + waited, waits=False)
    made.trainer_waits(made._began + waited + now, waits=waits)
    return made


PACINGS = st.builds(
    waiting,
    st.builds(
        pacing,
        batch=st.integers(1, 70),
        step=st.floats(0.01, 50.0),
        carry_over=st.floats(0.0, 5.0),
        began=st.integers(0, 1000 * SECOND),
    ),
    waited=st.integers(0, 50 * SECOND),
    now=st.integers(0, 50 * SECOND),
    waits=st.booleans(),
)


def test_a_step_and_a_carry_over_are_wanted_and_more_while_the_trainer_waits() -> None:
    made = pacing(4, step=8, carry_over=0.5)
    assert [made.wanted(second * SECOND) for second in (0, 1, 100)] == [6, 6, 6]
    assert pacing(4, step=8, carry_over=0.1).wanted(0) == 5, "a part of a group is a group"
    assert made.opens_at(6, 0) is None
    made.trainer_waits(10 * SECOND, waits=True)
    assert [made.wanted(second * SECOND) for second in (10, 11, 12, 14, 18)] == [6, 6, 7, 8, 10]
    assert [made.opens_at(groups, 10 * SECOND) for groups in (5, 6, 7)] == [10 * SECOND, 12 * SECOND, 14 * SECOND]
    made.trainer_waits(13 * SECOND, waits=False)
    assert made.wanted(100 * SECOND) == 7, "what was wanted while it waited is still wanted"
    made.begin_step(200 * SECOND)
    assert made.wanted(200 * SECOND) == 6


@given(PACINGS, st.integers(0, 400), st.integers(0, 200 * SECOND))
def test_wanted_and_opens_at_agree_to_the_nanosecond(made: Pacing, groups: int, later: Nanoseconds) -> None:
    """If the trainer goes on as it does, another group is wanted exactly from the time that `opens_at` gave."""
    now = made._began + 100 * SECOND
    opens = made.opens_at(groups, now)
    assert (made.wanted(now + later) > groups) == (opens is not None and opens <= now + later)
    if opens is not None and opens > now:
        assert made.wanted(opens) > groups
        assert made.wanted(opens - 1) <= groups
    made.check(now)


@given(PACINGS)
def test_every_step_is_fed_and_groups_do_not_pile_up(made: Pacing) -> None:
    """A step is always wanted, and no more later while the trainer works or is away."""
    now = made._began + 100 * SECOND
    assert made.wanted(now) >= made._groups_per_step
    if made._waits_since is None:
        assert made.wanted(now + 1000 * SECOND) == made.wanted(now)


def steps(made: Pacing, count: int, *, spare: int, waited: float = 0.0, held: bool = True, bound: int = 3) -> None:
    """Steps of one second each, in which the trainer had `spare` groups to spare and waited for this share."""
    for _ in range(count):
        began = made._began
        if held:
            made.record_held_back(began)
        made.record_spare(spare)
        made.record_spare(spare + 5)
        made.trainer_waits(began, waits=True)
        made.trainer_waits(began + round(waited * SECOND), waits=False)
        made.end_step(1.0, bound)
        made.begin_step(began + 2 * SECOND)


def test_the_carry_over_shrinks_by_what_is_to_spare() -> None:
    made = pacing(16, 1, carry_over=1.0)
    steps(made, 1, spare=8)
    assert 0.5 < made.carry_over < 1.0
    steps(made, 40, spare=16)
    assert 0 <= made.carry_over < 0.1
    made = pacing(16, 1, carry_over=1.0)
    for _ in range(40):
        steps(made, 1, spare=max(0, round(16 * (made.carry_over - 1))))
    assert made.carry_over == pytest.approx(1.0, abs=0.1), "a step is needed"


def test_the_carry_over_grows_by_waiting_up_to_the_bound_if_groups_were_held_back() -> None:
    made = pacing(16, 1, carry_over=0.5)
    made._needed = 0.5
    steps(made, 1, spare=0, waited=0.2, held=False)
    assert made.carry_over == 0.5, "nothing was held back"
    before = made.carry_over
    steps(made, 2, spare=0, waited=0.2)
    assert before + 0.1 < made.carry_over < before + 1.0
    steps(made, 100, spare=0, waited=0.2)
    assert made.carry_over == 3


def test_the_carry_over_rises_faster_than_it_falls() -> None:
    changes = []
    for surplus in (-0.25, 0.25):
        made = pacing(16, 1, carry_over=1.0)
        for _ in range(20):
            spare = made.carry_over - 1.0
            steps(made, 1, spare=max(0, round(16 * spare)), waited=max(0.0, -spare))
        before = made._needed
        spare = made.carry_over - 1.0 + surplus
        steps(made, 1, spare=max(0, round(16 * spare)), waited=max(0.0, -spare))
        changes.append(made._needed - before)
    assert changes[0] > 1.5 * -changes[1] > 0


def test_what_was_held_back_long_before_a_step_is_not_what_it_lacked() -> None:
    made = pacing(16, 1, carry_over=0.5, began=100 * SECOND)
    made.record_held_back(98 * SECOND)
    steps(made, 1, spare=0, waited=0.5, held=False)
    assert made.carry_over == 0.5
    made = pacing(16, 1, carry_over=0.5, began=100 * SECOND)
    made._needed = 0.5
    made.record_held_back(round(99.5 * SECOND))  # the latency is one second
    steps(made, 1, spare=0, waited=0.5, held=False)
    assert made.carry_over > 0.6


def test_steps_that_vary_get_a_larger_carry_over_than_steps_that_do_not() -> None:
    even, uneven = pacing(64, 1, carry_over=1.0), pacing(64, 1, carry_over=1.0)
    for number in range(80):
        # Each step needs half a step of carry-over; on the right a quarter more or less.
        for made, needed in ((even, 0.5), (uneven, 0.25 if number % 2 else 0.75)):
            spare = made.carry_over - needed
            steps(made, 1, spare=max(0, round(spare * 64)), waited=max(0.0, -spare))
    assert even.carry_over == pytest.approx(0.5, abs=0.06)
    assert 0.75 < uneven.carry_over < 1.5


@pytest.mark.parametrize("deviation", [0.0, 0.001, 0.01, 0.05, 0.2, 1.0, 50.0])
def test_the_stock_is_what_a_normal_distribution_needs(deviation: float) -> None:
    """The loss function of the normal distribution, computed here from its definition, gives the allowed wait."""
    z = _deviations_for(deviation)
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    loss = density - z * math.erfc(z / math.sqrt(2)) / 2
    wait = deviation * loss
    assert 0 <= z <= 3
    if 0 < z < 3:
        assert wait == pytest.approx(0.0025, rel=0.2)
    elif z == 0:
        assert wait <= 0.0025


def test_before_anything_is_measured_two_steps_are_enough_for_busy_instances() -> None:
    made = Pacing(8)
    assert not made.measured
    assert made.enough() == made.wanted(0) == 16
    assert made.opens_at(16, 0) is None


class Driver:
    """Drives an orchestrator event by event: two groups of one trajectory a step, one instance with much room."""

    def __init__(self, admission: str, *, batch: int = 2, stream: bool = True) -> None:
        settings = {"groups_per_step": batch, "group_size": 1, "max_response_tokens": 64, "stream": stream}
        config = ControlConfig.model_validate(settings | {"admission": admission})
        self.orchestrator = Orchestrator(config)
        self.started: list[tuple[int, Nanoseconds]] = []
        prompts = tuple(Prompt(key=str(number), tokens=8) for number in range(40))
        self.send(0, e.InstanceJoined(spec=InstanceSpec(instance="a", max_requests=16, kv_tokens=10_000)))
        self.send(0, e.PromptsArrived(prompts=prompts), e.TrainerReady(version=0))
        self.publish(0, 0)
        self.load(0, 0)

    def send(self, now: Nanoseconds, *events: e.Event) -> None:
        for event in events:
            for command in self.orchestrator.step(event, now):
                if isinstance(command, c.StartGroup):
                    self.started.append((command.group, now))

    def publish(self, now: Nanoseconds, version: int) -> None:
        self.send(now, e.Published(version=version, attempt=1, fingerprint=fingerprint(version)))

    def load(self, now: Nanoseconds, version: int) -> None:
        self.send(now, e.SlotLoaded(slot=SlotId("a", 0), version=version, fingerprint=fingerprint(version)))

    def finish(self, now: Nanoseconds, version: int, *groups: int) -> None:
        for group in groups:
            generated = e.Generated(
                trajectory=group,
                attempt=0,
                instance="a",
                version=version,
                fingerprint=fingerprint(version),
                tokens=10,
                kv_tokens=0,
            )
            self.send(now, generated, e.Scored(trajectory=group, reward=1.0))

    def first_step(self) -> None:
        """Latency 1 s; the trainer works from 1 s to 10 s and takes groups until 5 s: T = 9, S = 4."""
        self.finish(1 * SECOND, 0, 0, 1)
        self.send(5 * SECOND, e.Accumulated(step=0, attempt=1, groups=2))
        self.send(9 * SECOND, e.Trained(step=0, attempt=1))
        self.publish(10 * SECOND, 1)
        self.finish(10 * SECOND, 0, 2, 3)
        self.load(10 * SECOND, 1)


def test_just_in_time_admission_begins_with_two_steps_of_groups() -> None:
    driver = Driver("just_in_time")
    assert driver.started == [(group, 0) for group in range(4)]
    (slot,) = driver.orchestrator.snapshot().slots
    assert slot.idle is None


def test_a_held_back_group_starts_while_the_trainer_waits_without_any_other_event() -> None:
    driver = Driver("just_in_time")
    driver.first_step()
    driver.finish(12 * SECOND, 1, 4, 5)
    pacing = driver.orchestrator._context.pacing
    for version in (2, 3):  # each trains the two groups that are finished
        end = (20 if version == 2 else 30) * SECOND
        driver.send(end, e.Accumulated(step=version - 1, attempt=1, groups=2), e.Trained(step=version - 1, attempt=1))
        driver.publish(end + SECOND, version)
        pacing.carry_over = 0.0
        driver.load(end + SECOND, version)
    # The trainer waits for the two groups of version 3 from 31 s on, and wants another one after half a step.
    assert driver.started[6:] == [(6, 31 * SECOND), (7, 31 * SECOND)]
    assert driver.orchestrator.snapshot().admissible == 0
    due = driver.orchestrator.wake_at()
    assert pacing.step_seconds is not None
    assert due == pytest.approx((31 + pacing.step_seconds / 2) * SECOND)
    assert due is not None
    driver.send(due - 1, e.Tick())
    assert len(driver.started) == 8
    driver.send(due, e.Tick())
    assert driver.started[8:] == [(8, due)]


def test_a_trainer_that_begins_to_wait_wants_more_after_a_while() -> None:
    """It has one group of version 2's step and no other; nothing but its own report says that it waits."""
    driver = Driver("just_in_time")
    driver.first_step()
    driver.finish(12 * SECOND, 1, 4)
    driver.send(20 * SECOND, e.Accumulated(step=1, attempt=1, groups=2), e.Trained(step=1, attempt=1))
    driver.publish(21 * SECOND, 2)
    pacing = driver.orchestrator._context.pacing
    pacing.carry_over = 0.0
    driver.send(22 * SECOND, e.Tick())
    before = driver.orchestrator.wake_at()
    assert pacing.step_seconds is not None
    due = (25 + pacing.step_seconds / 2) * SECOND
    assert before is not None
    assert before > due, "it works"
    driver.send(25 * SECOND, e.Accumulated(step=2, attempt=1, groups=1))
    assert driver.orchestrator.wake_at() == pytest.approx(due)


@pytest.mark.parametrize(("stream", "finished", "spare"), [(True, 7, 2), (True, 8, 3), (False, 7, 0), (False, 8, 0)])
def test_spare_are_the_groups_beyond_those_that_the_trainer_can_start_on(
    stream: bool, finished: int, spare: int
) -> None:
    """Three or four groups of four are finished when the step begins. A step that needs all at once has none to spare;
    one that streams can start on the first, and has one less to spare with each that it is done with."""
    driver = Driver("just_in_time", batch=4, stream=stream)
    driver.finish(1 * SECOND, 0, *range(finished))
    driver.send(5 * SECOND, e.Accumulated(step=0, attempt=1, groups=4), e.Trained(step=0, attempt=1))
    driver.publish(10 * SECOND, 1)
    pacing = driver.orchestrator._context.pacing
    assert pacing._spare == spare
    driver.send(12 * SECOND, e.Accumulated(step=1, attempt=1, groups=1))
    complete = finished == 8
    assert pacing._spare == (spare if complete or not stream else spare - 1), "a complete batch takes no more"


def test_a_step_in_which_the_trainer_was_restarted_says_nothing_about_step_times() -> None:
    driver = Driver("just_in_time")
    driver.first_step()
    pacing = driver.orchestrator._context.pacing
    before = pacing.step_seconds
    driver.send(11 * SECOND, e.TrainerLost(reason="killed"))
    driver.send(500 * SECOND, e.TrainerReady(version=1))
    driver.send(900 * SECOND, e.Accumulated(step=1, attempt=2, groups=2), e.Trained(step=1, attempt=2))
    driver.send(901 * SECOND, e.Published(version=2, attempt=2, fingerprint=fingerprint(2)))
    assert driver.orchestrator.newest == 2
    assert pacing.step_seconds == before


def test_an_idle_slot_is_ahead_of_the_trainer_while_groups_are_held_back() -> None:
    driver = Driver("just_in_time")
    driver.first_step()
    driver.orchestrator._context.pacing.carry_over = 0.0
    driver.finish(12 * SECOND, 1, 4, 5)
    (slot,) = driver.orchestrator.snapshot().slots
    assert slot.idle is not None
    assert slot.idle.reason is IdleReason.AHEAD


def test_eager_admission_fills_an_idle_instance_up_to_the_bound() -> None:
    driver = Driver("eager")
    driver.first_step()
    driver.finish(11 * SECOND, 1, 4, 5)
    assert driver.started[6:] == [(6, 11 * SECOND)]


def test_a_trainer_that_is_away_wants_no_more_groups() -> None:
    """It is lost in mid-step, and the only instance has nothing to do."""
    driver = Driver("just_in_time")
    driver.first_step()
    driver.send(11 * SECOND, e.TrainerLost(reason="killed"))
    driver.finish(12 * SECOND, 1, 4, 5)
    driver.send(100 * SECOND, e.Tick())
    assert len(driver.started) == 6
    assert driver.orchestrator._context.allowance() == 4


@pytest.mark.parametrize("text", ["sync", "one_step_off", "partial", "dora:k0", "dora:elastic"])
def test_just_in_time_admission_changes_nothing_elsewhere(text: str) -> None:
    found = [
        simulate(preset("laptop", ["steps=5", f"control.admission={rule}"]), parse_variant(text))
        for rule in ("eager", "just_in_time")
    ]
    assert found[0] == found[1]


def simulated(rule: str, *settings: str) -> Result:
    return simulate(preset("laptop", ["steps=60", f"control.admission={rule}", *settings]), parse_variant("dora"))


@pytest.mark.parametrize(
    ("utilisation", "share"), [(0.07, 0.15), (0.29, 0.5)], ids=["trainer much slower", "trainer slower"]
)
def test_groups_are_fresh_where_the_trainer_is_slower_and_steps_take_as_long(utilisation: float, share: float) -> None:
    settings = f"trainer.utilisation={utilisation}"
    eager, late = simulated("eager", settings), simulated("just_in_time", settings)
    assert late.mean_staleness < share * eager.mean_staleness
    assert late.over_lower_bound < 1.02 * eager.over_lower_bound


def test_nothing_is_held_back_where_rollout_is_slower() -> None:
    settings = "trainer.utilisation=0.9"
    eager, late = simulated("eager", settings), simulated("just_in_time", settings)
    assert late.idle.get("ahead of the trainer", 0.0) < 0.01
    assert late.over_lower_bound < 1.02 * eager.over_lower_bound
