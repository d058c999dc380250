"""Just-in-time admission: as late as the trainer allows and never later, with a timer of its own."""

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
from dora_rl.orchestrator.pacing import Pacing
from dora_rl.sim.fake_engine import fingerprint
from dora_rl.sim.presets import preset
from dora_rl.sim.run import Result, parse_variant, simulate


def pacing(batch: int, step: float, taking: float, latency: float, margin: float, began: Nanoseconds = 0) -> Pacing:
    made = Pacing(batch)
    made.record_latency(round(latency * SECOND))
    made.record_step_time(step, taking)
    made.begin_step(began)
    made.margin = margin
    return made


TIMES = st.floats(0.0, 50.0)
PACINGS = st.builds(
    pacing,
    batch=st.integers(1, 70),
    step=st.floats(0.01, 50.0),
    taking=TIMES,
    latency=TIMES,
    margin=st.floats(0.0, 5.0),
    began=st.integers(0, 1000 * SECOND),
)


def test_a_group_is_wanted_when_the_trainer_will_take_it() -> None:
    """A step of 8 s that takes its 4 groups in the first 4: one each second, and the next step's 4 s later."""
    made = pacing(4, step=8, taking=4, latency=0, margin=0)
    assert [made.wanted(second * SECOND) for second in range(10)] == [1, 2, 3, 4, 4, 4, 4, 4, 5, 5]
    assert [made.opens_at(groups) for groups in range(6)] == [0, 1 * SECOND, 2 * SECOND, 3 * SECOND, 8 * SECOND, None]
    earlier = pacing(4, step=8, taking=4, latency=6, margin=0.25)  # 6 s and a quarter of a step sooner
    assert [earlier.wanted(second * SECOND) for second in range(5)] == [5, 6, 7, 8, 8]
    at_once = pacing(4, step=8, taking=0, latency=7, margin=0)
    assert [at_once.wanted(second * SECOND) for second in range(3)] == [4, 8, 8]


@given(PACINGS, st.integers(0, 400), st.integers(0, 100 * SECOND))
def test_wanted_and_opens_at_agree_to_the_nanosecond(made: Pacing, groups: int, elapsed: Nanoseconds) -> None:
    began = made._began
    opens = made.opens_at(groups)
    now = began + elapsed
    assert (made.wanted(now) > groups) == (opens is not None and opens <= now)
    if opens is not None:
        assert made.wanted(opens) > groups
        assert opens == began or made.wanted(opens - 1) <= groups


@given(PACINGS)
def test_every_step_is_fed_and_groups_do_not_pile_up(made: Pacing) -> None:
    """The last group of a step is wanted within a step's time, and no more later, however long the trainer is away."""
    end = made._began + made._step
    last = made.opens_at(made._groups_per_step - 1)
    assert last is not None
    assert last <= end
    assert made.wanted(end + 1000 * SECOND) == made.wanted(end)


def test_the_margin_grows_with_waiting_and_shrinks_without() -> None:
    made = pacing(16, 1, 1, 1, margin=0.5, began=10 * SECOND)
    made.record_trainer_wait(0.2, limit=4)
    assert made.margin < 0.5, "nothing was held back"
    made.record_held_back(8 * SECOND)
    made.record_trainer_wait(0.2, limit=4)
    assert made.margin < 0.5, "what was held back would have come before the step"
    made.record_held_back(9 * SECOND)
    before = made.margin
    made.record_trainer_wait(0.2, limit=4)
    assert before + 0.5 < made.margin < before + 0.7
    for _ in range(50):
        made.record_trainer_wait(0.2, limit=4)
    assert made.margin == 4
    for _ in range(150):
        made.record_trainer_wait(0.0, limit=4)
    assert made.margin < 0.5


def test_before_anything_is_measured_two_steps_are_enough_for_busy_instances() -> None:
    made = Pacing(8)
    assert not made.measured
    assert made.enough() == 16


class Driver:
    """Drives an orchestrator event by event: two groups of one trajectory a step, one instance with much room."""

    def __init__(self, admission: str) -> None:
        config = ControlConfig.model_validate(
            {"groups_per_step": 2, "group_size": 1, "max_response_tokens": 64, "admission": admission}
        )
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


def test_a_held_back_group_starts_at_its_time_without_any_other_event() -> None:
    driver = Driver("just_in_time")
    driver.first_step()
    assert driver.started == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 10 * SECOND), (5, 10 * SECOND)]
    driver.finish(11 * SECOND, 1, 4, 5)
    (slot,) = driver.orchestrator.snapshot().slots
    assert slot.idle is not None
    assert slot.idle.reason is IdleReason.AHEAD
    assert driver.orchestrator.snapshot().admissible == 0
    # Group 4 of the untrained is needed after two steps; it takes 1 s, and the margin is 2 / sqrt(2) steps.
    due = driver.orchestrator.wake_at()
    assert due == pytest.approx((10 + 18 - 1 - 2 / math.sqrt(2) * 9) * SECOND)
    assert due is not None
    driver.send(due - 1, e.Tick())
    assert len(driver.started) == 6
    driver.send(due, e.Tick())
    assert driver.started[6:] == [(6, due)]


def test_eager_admission_fills_an_idle_instance_up_to_the_bound() -> None:
    driver = Driver("eager")
    driver.first_step()
    driver.finish(11 * SECOND, 1, 4, 5)
    assert driver.started[6:] == [(6, 11 * SECOND)]


def test_a_trainer_that_is_away_gets_no_more_than_its_next_step_needs() -> None:
    """It is lost in mid-step: the number of wanted groups stops growing after the time of one step."""
    driver = Driver("just_in_time")
    driver.first_step()
    driver.send(11 * SECOND, e.TrainerLost(reason="killed"))
    for second in range(12, 600):
        groups = [group for group, _ in driver.started]
        driver.finish(second * SECOND, 1, groups[-1])
        if second == 30:
            kept = len(driver.started)
    assert len(driver.started) == kept


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
    ("utilisation", "share"), [(0.07, 0.3), (0.29, 0.75)], ids=["trainer much slower", "trainer slower"]
)
def test_groups_are_fresh_where_the_trainer_is_slower_and_steps_take_as_long(utilisation: float, share: float) -> None:
    settings = f"trainer.utilisation={utilisation}"
    eager, late = simulated("eager", settings), simulated("just_in_time", settings)
    assert late.mean_staleness < share * eager.mean_staleness
    assert late.mean_staleness > late.least_staleness - 0.1
    assert late.over_lower_bound < 1.02 * eager.over_lower_bound


def test_nothing_is_held_back_where_rollout_is_slower() -> None:
    settings = "trainer.utilisation=0.9"
    eager, late = simulated("eager", settings), simulated("just_in_time", settings)
    assert late.idle.get("ahead of the trainer", 0.0) < 0.01
    assert late.over_lower_bound < 1.02 * eager.over_lower_bound
