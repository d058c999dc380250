"""Single decisions of the orchestrator that random schedules reach only by chance."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.activities import IdleReason
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError, IntegrityError, UserError
from dora_rl.core.probe import ProbeResult
from dora_rl.core.types import SECOND, DecodeCost, InstanceSpec, Prompt, SlotId
from dora_rl.orchestrator.config import ControlConfig, Deadlines, ModeName
from dora_rl.orchestrator.length_predictor import LengthPredictor
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.orchestrator.placement import PlacementFacts, VersionFacts, deadline, proportional
from dora_rl.sim.fake_engine import fingerprint
from tests.schedules import run_schedule

CONFIG = ControlConfig(groups_per_step=2, group_size=2, max_response_tokens=64, max_staleness=1)


def started(config: ControlConfig = CONFIG, slots: int = 1) -> Orchestrator:
    """An orchestrator with one instance that serves version 0 and has two groups running."""
    orchestrator = Orchestrator(config)
    spec = InstanceSpec(instance="a", slots=slots, max_requests=4, kv_tokens=10_000)
    prompts = tuple(Prompt(key=str(number), tokens=8) for number in range(8))
    for event in (
        e.InstanceJoined(spec=spec),
        e.PromptsArrived(prompts=prompts),
        e.TrainerReady(version=0),
        e.Published(version=0, attempt=1, fingerprint=fingerprint(0)),
        e.SlotLoaded(slot=SlotId("a", 0), version=0, fingerprint=fingerprint(0)),
    ):
        orchestrator.step(event, 0)
    return orchestrator


def generated(trajectory: int, version: int = 0, served: str | None = None) -> e.Generated:
    return e.Generated(
        trajectory=trajectory,
        attempt=0,
        instance="a",
        version=version,
        fingerprint=served or fingerprint(version),
        tokens=10,
        kv_tokens=0,
    )


def test_a_trajectory_from_other_weights_stops_the_run() -> None:
    with pytest.raises(IntegrityError, match="trajectory 1"):
        started().step(generated(1, version=3), 1)
    with pytest.raises(IntegrityError, match="fingerprint"):
        started().step(generated(1, served="something else"), 1)


def test_a_slot_that_serves_other_weights_stops_the_run() -> None:
    orchestrator = started()
    orchestrator.step(e.InstanceJoined(spec=InstanceSpec(instance="b", max_requests=4, kv_tokens=10_000)), 1)
    with pytest.raises(IntegrityError, match="published was"):
        orchestrator.step(e.SlotLoaded(slot=SlotId("b", 0), version=0, fingerprint="old weights"), 2)


def probed(digest: str) -> e.SlotLoaded:
    result = ProbeResult(digest=digest, difference=1e-6, tolerance=1e-3)
    return e.SlotLoaded(slot=SlotId("a", 0), version=0, fingerprint=fingerprint(0), probe=result)


def test_a_slot_that_was_not_compared_with_the_published_probe_stops_the_run() -> None:
    def load(event: e.SlotLoaded) -> None:
        orchestrator = Orchestrator(CONFIG)
        orchestrator.step(e.InstanceJoined(spec=InstanceSpec(instance="a", max_requests=4, kv_tokens=10_000)), 0)
        orchestrator.step(e.TrainerReady(version=0), 0)
        orchestrator.step(e.Published(version=0, attempt=1, fingerprint=fingerprint(0), probe="abc"), 0)
        orchestrator.step(event, 1)

    load(probed("abc"))
    with pytest.raises(IntegrityError, match="abc was published, other was compared with"):
        load(probed("other"))
    with pytest.raises(IntegrityError, match="abc was published, none was compared with"):
        load(e.SlotLoaded(slot=SlotId("a", 0), version=0, fingerprint=fingerprint(0)))


def test_a_slot_that_differs_from_the_probe_is_loaded_again_and_then_stops_the_run() -> None:
    orchestrator = started()
    orchestrator.step(e.InstanceJoined(spec=InstanceSpec(instance="b", max_requests=4, kv_tokens=10_000)), 1)
    failed = e.SlotLoadFailed(slot=SlotId("b", 0), version=0, reason="it differs by 0.3", differs=True)
    for now in (2, 3):
        commands = orchestrator.step(failed, now)
        assert any(isinstance(one, c.LoadVersion) and one.slot == failed.slot for one in commands)
    with pytest.raises(IntegrityError, match=r"it differs by 0.3 \(in 3 loads in a row\)"):
        orchestrator.step(failed, 4)


def test_a_trainer_that_comes_back_with_an_unknown_version_is_refused() -> None:
    orchestrator = started()
    orchestrator.step(e.TrainerLost(), 1)
    with pytest.raises(IntegrityError, match="version 7"):
        orchestrator.step(e.TrainerReady(version=7), 2)


def test_reports_of_an_earlier_trainer_attempt_are_ignored() -> None:
    orchestrator = started()
    for trajectory in range(4):
        orchestrator.step(generated(trajectory), 1)
        orchestrator.step(e.Scored(trajectory=trajectory, reward=1.0), 1)
    orchestrator.step(e.TrainerLost(), 2)
    again = orchestrator.step(e.TrainerReady(version=0), 3)
    assert any(isinstance(command, c.Apply) and command.attempt == 2 for command in again)
    late = orchestrator.step(e.Trained(step=0, attempt=1), 4)
    assert not any(isinstance(command, c.Publish) for command in late)
    own = orchestrator.step(e.Trained(step=0, attempt=2), 5)
    assert any(isinstance(command, c.Publish) and command.version == 1 for command in own)


def test_an_instance_that_is_too_small_is_refused_when_it_joins() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        Orchestrator(CONFIG).step(
            e.InstanceJoined(spec=InstanceSpec(instance="a", max_requests=1, kv_tokens=10_000)), 0
        )
    with pytest.raises(ConfigError, match="max_response_tokens"):
        Orchestrator(CONFIG).step(e.InstanceJoined(spec=InstanceSpec(instance="a", max_requests=4, kv_tokens=10)), 0)


def started_groups(commands: list[c.Command]) -> int:
    return sum(isinstance(command, c.StartGroup) for command in commands)


def test_a_larger_bound_opens_admission_at_once() -> None:
    """K = 0 and a step's groups are running: an empty instance stays empty until the bound is raised."""
    orchestrator = started(CONFIG.model_copy(update={"max_staleness": 0}))
    orchestrator.step(e.InstanceJoined(spec=InstanceSpec(instance="b", max_requests=4, kv_tokens=10_000)), 1)
    loaded = e.SlotLoaded(slot=SlotId("b", 0), version=0, fingerprint=fingerprint(0))
    assert not started_groups(orchestrator.step(loaded, 2))
    assert started_groups(orchestrator.step(e.BoundChanged(max_staleness=1), 3)) == 2
    assert orchestrator.snapshot().max_staleness == 1


def test_a_smaller_bound_waits_until_the_untrained_groups_fit() -> None:
    """K = 1 falls to 0 with 2 * B groups untrained: nothing is admitted until the first step is published."""
    orchestrator = started()
    orchestrator.step(e.InstanceJoined(spec=InstanceSpec(instance="b", max_requests=4, kv_tokens=10_000)), 1)
    orchestrator.step(e.SlotLoaded(slot=SlotId("b", 0), version=0, fingerprint=fingerprint(0)), 2)
    assert orchestrator.snapshot().untrained == {0: 4}
    orchestrator.step(e.BoundChanged(max_staleness=0), 3)
    commands = []
    for trajectory in range(8):  # all of version 0, half of them on the other instance
        event = generated(trajectory) if trajectory < 4 else replace(generated(trajectory), instance="b")
        commands += orchestrator.step(event, 4)
        commands += orchestrator.step(e.Scored(trajectory=trajectory, reward=1.0), 4)
    commands += orchestrator.step(e.Trained(step=0, attempt=1), 5)
    commands += orchestrator.step(e.Published(version=1, attempt=1, fingerprint=fingerprint(1)), 6)
    for instance in ("a", "b"):
        commands += orchestrator.step(e.SlotLoaded(slot=SlotId(instance, 0), version=1, fingerprint=fingerprint(1)), 7)
    assert not started_groups(commands)
    # The other half was admitted under K = 1 and is trained at staleness 1.
    assert [command.groups for command in commands if isinstance(command, c.Apply)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "partial"])
def test_only_dora_can_change_its_bound_and_a_refusal_changes_nothing(mode: ModeName) -> None:
    orchestrator = started(CONFIG.model_copy(update={"mode": mode}))
    before = orchestrator.snapshot()
    with pytest.raises(UserError, match="only 'dora' can change it"):
        orchestrator.step(e.BoundChanged(max_staleness=2), 1)
    assert orchestrator.snapshot() == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mode": "dorra"}, "'mode': there is no mode 'dorra'; did you mean 'dora'?"),
        ({"mode": "xyz"}, "'mode': there is no mode 'xyz'; known are: sync, one_step_off, partial, dora"),
        ({"placement": "proportinal"}, "there is no placement rule 'proportinal'; did you mean 'proportional'?"),
    ],
)
def test_an_unknown_mode_or_placement_rule_is_refused_with_the_nearest_name(
    setting: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(ControlConfig, CONFIG.model_dump() | setting)
    assert str(refusal.value).endswith(message)


def test_a_snapshot_changes_nothing() -> None:
    """In `sync` a batch opens when the one before has finished; no query does that as a side effect."""
    for seed in range(5):
        runtime = run_schedule(seed, "sync")
        orchestrator = Orchestrator(runtime.config)
        for event, now, commands in runtime.log:  # chaos took a snapshot after each event, this loop takes none
            assert orchestrator.step(event, now) == commands


@pytest.mark.parametrize("bound", [-1, 65])
def test_an_impossible_bound_is_refused(bound: int) -> None:
    with pytest.raises(UserError, match="between 0 and 64"):
        started().step(e.BoundChanged(max_staleness=bound), 1)


def test_without_progress_the_watchdog_reports_who_waits_for_what() -> None:
    orchestrator = started(
        CONFIG.model_copy(update={"deadlines": CONFIG.deadlines.model_copy(update={"progress": 1e6})})
    )
    stalls = [
        command
        for minute in range(1, 60)
        for command in orchestrator.step(e.Tick(), minute * 60 * SECOND)
        if isinstance(command, c.Stalled)
    ]
    assert any("version 0: 2 groups unfinished" in wait for wait in stalls[0].waits)


def test_an_instance_without_progress_is_evicted_and_its_requests_continue_elsewhere() -> None:
    orchestrator = started()
    commands = orchestrator.step(e.Tick(), 599 * SECOND)
    assert not any(isinstance(command, c.EvictInstance) for command in commands), "a long prefill is no fault"
    commands = orchestrator.step(e.Tick(), 601 * SECOND)
    assert any(isinstance(command, c.EvictInstance) for command in commands)
    spec = InstanceSpec(instance="b", max_requests=4, kv_tokens=10_000)
    loads = [x for x in orchestrator.step(e.InstanceJoined(spec=spec), 602 * SECOND) if isinstance(x, c.LoadVersion)]
    assert [load.version for load in loads] == [0]
    loaded = e.SlotLoaded(slot=SlotId("b", 0), version=0, fingerprint=fingerprint(0))
    resumed = [x for x in orchestrator.step(loaded, 603 * SECOND) if isinstance(x, c.Resume)]
    assert sorted(resume.trajectory for resume in resumed) == [0, 1, 2, 3]
    assert {resume.attempt for resume in resumed} == {1}


def test_a_version_that_lost_its_only_slot_takes_over_a_slot_of_the_newest() -> None:
    """Its requests must not wait until the newest version happens to drain."""
    config = ControlConfig(groups_per_step=1, group_size=1, max_response_tokens=64, max_staleness=8)
    orchestrator = Orchestrator(config)
    prompts = tuple(Prompt(key=str(number), tokens=8) for number in range(20))
    commands: list[c.Command] = []

    def send(*events: e.Event) -> None:
        for event in events:
            commands.extend(orchestrator.step(event, 0))

    def join(name: str) -> e.Event:
        return e.InstanceJoined(spec=InstanceSpec(instance=name, max_requests=4, kv_tokens=10_000))

    def loaded(name: str, version: int) -> e.Event:
        return e.SlotLoaded(slot=SlotId(name, 0), version=version, fingerprint=fingerprint(version))

    send(join("a"), e.PromptsArrived(prompts=prompts), e.TrainerReady(version=0))
    send(e.Published(version=0, attempt=1, fingerprint=fingerprint(0)), loaded("a", 0))
    send(generated(0), e.Scored(trajectory=0, reward=1.0), e.Trained(step=0, attempt=1))
    send(e.Published(version=1, attempt=1, fingerprint=fingerprint(1)), join("b"), loaded("b", 1))
    commands.clear()
    send(e.InstanceLost(instance="a"))
    slots = {view.slot.instance: view for view in orchestrator.snapshot().slots}
    assert orchestrator.snapshot().waiting
    assert slots["b"].requests
    assert slots["b"].leaving
    send(e.Tick())
    assert not any(isinstance(command, c.StartGroup) for command in commands)


def test_requests_on_a_paused_instance_continue_although_no_other_slot_has_their_version() -> None:
    """Its devices train: another slot loads the version of its requests and takes them over."""
    config = ControlConfig(groups_per_step=1, group_size=1, max_response_tokens=64, max_staleness=3)
    orchestrator = Orchestrator(config)
    names = ("shared", "b", "c")
    specs = [InstanceSpec(instance=it, max_requests=1, kv_tokens=10_000, shares_trainer=it == "shared") for it in names]
    commands: list[c.Command] = []

    def send(*events: e.Event) -> None:
        for event in events:
            commands.extend(orchestrator.step(event, 0))

    def end(trajectory: int, instance: str) -> None:
        send(replace(generated(trajectory), instance=instance))

    def load(version: int, *instances: str) -> None:
        for it in instances:
            send(e.SlotLoaded(slot=SlotId(it, 0), version=version, fingerprint=fingerprint(version)))

    send(*[e.InstanceJoined(spec=spec) for spec in specs])
    send(e.PromptsArrived(prompts=tuple(Prompt(key=str(number), tokens=8) for number in range(8))))
    send(e.TrainerReady(version=0), e.Published(version=0, attempt=1, fingerprint=fingerprint(0)))
    load(0, *names)
    began = {it.slot.instance: it.group for it in commands if isinstance(it, c.StartGroup)}
    assert set(began) == set(names)
    end(began["b"], "b")  # the next group begins there
    send(e.Scored(trajectory=began["b"], reward=1.0))
    send(e.Trained(step=0, attempt=1), e.Published(version=1, attempt=1, fingerprint=fingerprint(1)))
    end(began["c"], "c")
    end(3, "b")
    send(e.Scored(trajectory=3, reward=1.0))  # this pauses the shared instance, the only one that serves version 0
    commands.clear()
    load(1, "b")
    loads = [it.slot.instance for it in commands if isinstance(it, c.LoadVersion) and it.version == 0]
    assert loads == ["b"]
    load(0, "b")
    moves = [it for it in commands if isinstance(it, c.Move)]
    assert [(it.source.instance, it.target.instance) for it in moves] == [("shared", "b")]


def test_each_turn_of_an_environment_has_its_own_deadline() -> None:
    deadlines = Deadlines(tool=10, heartbeat=1000, progress=1000, train=1000)
    orchestrator = started(CONFIG.model_copy(update={"deadlines": deadlines}))

    def after(seconds: float, event: e.Event) -> list[c.FailTrajectory]:
        return [one for one in orchestrator.step(event, int(seconds * SECOND)) if isinstance(one, c.FailTrajectory)]

    assert not after(0, e.Parked(trajectory=0, attempt=0, kv_tokens=0))
    assert not after(6, e.Unparked(trajectory=0, attempt=0, kv_tokens=None))
    assert not after(7, e.Parked(trajectory=0, attempt=0, kv_tokens=None))
    assert not after(11, e.Tick())  # the first turn's deadline; this is the second
    failed = after(18, e.Tick())
    assert [one.trajectory for one in failed] == [0]


def test_a_free_slot_waits_for_the_same_tools_as_its_instance() -> None:
    orchestrator = started(slots=2)

    def causes() -> list[IdleReason | None]:
        return [None if slot.idle is None else slot.idle.reason for slot in orchestrator.snapshot().slots]

    for trajectory in range(8):  # all that the bound allows: parked requests leave their room to others
        orchestrator.step(e.Parked(trajectory=trajectory, attempt=0, kv_tokens=0), 0)
    assert causes() == [IdleReason.TOOL, IdleReason.TOOL]
    for trajectory in range(8):
        orchestrator.step(e.Unparked(trajectory=trajectory, attempt=0, kv_tokens=0), 0)
        orchestrator.step(generated(trajectory), 0)
    assert IdleReason.TOOL not in causes()


def test_a_report_without_kv_load_does_not_change_the_instances_load() -> None:
    orchestrator = started()
    orchestrator.step(e.Progress(instance="a", kv_tokens=500, tokens={0: 3}), 1)
    orchestrator.step(e.Parked(trajectory=0, attempt=0, kv_tokens=None), 2)
    assert orchestrator._context.instances.by_id["a"].kv_tokens == 500


def test_the_same_events_give_the_same_commands() -> None:
    """A recorded run replays through a fresh orchestrator, command for command."""
    recorded = run_schedule(3)
    assert len(recorded.log) > 50
    fresh = Orchestrator(recorded.config)
    for event, now, commands in recorded.log:
        assert fresh.step(event, now) == commands


def facts(*old: VersionFacts, admissible: int = 100, slots: int = 10) -> PlacementFacts:
    return PlacementFacts(
        newest=9,
        old=old,
        newest_requests=50 + admissible,
        admissible=admissible,
        slots=slots,
        max_requests=10,
        kv_tokens=1000,
        decode=DecodeCost(base=0.01, per_request=0.01),
        overhead_seconds=1.0,
    )


def version(number: int, requests: int, seconds_left: float = 1e9, longest: int = 100) -> VersionFacts:
    return VersionFacts(
        version=number, requests=requests, kv_tokens=requests, slots=3, longest=longest, seconds_left=seconds_left
    )


def test_deadline_keeps_the_fewest_slots_that_hold_a_version() -> None:
    assert deadline(facts(version(7, 11), version(8, 30))) == {7: 2, 8: 3}


def test_deadline_spreads_a_version_that_would_be_late() -> None:
    relaxed = deadline(facts(version(7, 10)))
    pressed = deadline(facts(version(7, 10, seconds_left=6.0)))
    assert relaxed == {7: 1}
    assert pressed[7] > 1


def test_deadline_gives_spare_slots_to_the_oldest_while_admission_is_closed() -> None:
    closed = deadline(facts(version(7, 8, longest=10_000), admissible=0))
    assert closed[7] > 1


def test_proportional_gives_every_version_at_least_one_slot() -> None:
    targets = proportional(facts(version(7, 1), version(8, 30)))
    assert targets[7] == 1
    assert 1 <= targets[8] < 10


def test_remaining_length_is_predicted_from_observed_lengths() -> None:
    lengths = LengthPredictor(longest=10_000)
    random_ = random.Random(0)
    seen = [int(random_.lognormvariate(5, 1)) + 1 for _ in range(5000)]
    for tokens in seen:
        lengths.observe(tokens)
    beyond = sorted(tokens - 200 for tokens in seen if tokens > 218)
    assert lengths.remaining(200, 0.5) == pytest.approx(beyond[len(beyond) // 2], rel=0.25)
    assert lengths.remaining(9_999, 0.5) == 1
    assert lengths.survival(200) == pytest.approx(sum(t > 200 for t in seen) / len(seen), abs=0.05)


def test_a_duplicate_report_does_not_bring_a_lost_instance_back() -> None:
    orchestrator = started()
    spec = InstanceSpec(instance="late", max_requests=8, kv_tokens=10_000)
    orchestrator.step(e.InstanceJoined(spec=spec), SECOND)
    orchestrator.step(e.InstanceLost(instance="late"), 2 * SECOND)
    commands = orchestrator.step(e.InstanceJoined(spec=spec), 3 * SECOND)
    assert not any(isinstance(command, c.LoadVersion) and command.slot.instance == "late" for command in commands)
    assert all(view.slot.instance != "late" for view in orchestrator.snapshot().slots)
