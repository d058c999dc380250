"""Supervisor settings, from the config file to the messages that the supervisor sends to its workers."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.core.types import SECOND, InstanceSpec, Prompt, SlotId
from dora_rl.envs.data import Problem
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.supervisor.trackers import trackers
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.workers import reward as reward_worker
from tests.runtime.making import lines
from tests.settings.workers import (
    RecordingChannel,
    SupervisorHarness,
    at,
    folder_of,
    publish,
    start,
    supervisor,
    tree_with,
)

ROOMY = {"max_requests": 1000, "kv_tokens": 1_000_000}
MANY, SMALL = at("rollout.instances", 16), {"max_requests": 2, "kv_tokens": 1000}
"""There are more instances than groups, so an idle instance gets a group whenever the admission rules allow one."""
ONE = at("rollout.instances", 1)
EAGER = {"admission": "eager"}
TURNS = {"environment": {"kind": "turns.py:Turns", "timeout_seconds": 11.0, "concurrency": 3}}


def admitted(harness: SupervisorHarness) -> int:
    """Return the number of groups that were started."""
    return len(harness.submits())


# -- processes ------------------------------------------------------------------------------------------------------


def test_the_configured_number_of_processes_is_started(base: Path) -> None:
    changes = {"rollout": {"instances": 3}, "reward": {"workers": 2}, "trainer": {"ranks": 2}}
    with supervisor(base, changes) as harness:
        assert sorted(harness.backend.workers) == ["i0", "i1", "i2", "rank1", "reward0", "reward1", "trainer"]
        message = harness.sent_to("rank1", m.StartWorker)[0]
        assert (message.rank, message.ranks) == (1, 2)


def test_cores_are_shared_up_to_the_thread_limit(base: Path) -> None:
    """The test backend has 8 cores; the only instance gets all of them while the trainer is idle."""
    for threads, found in ((3, 3), (0, 8)):
        with supervisor(base, ONE, at("threads", threads)) as harness:
            harness.begin()
            assert harness.sent_to("i0", m.SetThreads)[-1].count == found


def test_the_run_directory_and_weights_are_where_configured(base: Path, tmp_path: Path) -> None:
    """This covers `out` and `weights`."""
    folder = folder_of(base, at("out", str(tmp_path / "elsewhere")), at("weights", "memory"))
    assert folder.path.parent == tmp_path / "elsewhere"
    publish(folder)
    assert not folder.weights.exists()
    assert (Path("/dev/shm") / f"dora-rl-{folder.memory}").is_dir()
    folder.store(folder.read()).clear()
    folder = folder_of(base)
    publish(folder)
    assert any(folder.weights.iterdir())


def test_restarts_follow_the_configured_limit_and_backoff(base: Path) -> None:
    with supervisor(base, {"supervision": {"restarts": 2, "backoff_seconds": 100.0}}) as harness:
        supervisor_: Any = harness.run.supervisor
        process = harness.process("i0")
        for pause in (100.0, 200.0):
            before = time.monotonic()
            supervisor_.worker_lost(process, "it is lost")
            assert before + pause <= process.restart_at <= time.monotonic() + pause
            assert not process.given_up
        supervisor_.worker_lost(process, "it is lost")
        assert process.given_up


def test_an_instance_silent_past_the_heartbeat_deadline_is_lost(base: Path) -> None:
    for heartbeat, lost in ((50.0, True), (5000.0, False)):
        with supervisor(base, at("control.deadlines.heartbeat", heartbeat)) as harness:
            harness.begin()
            for one in harness.run.supervisor._processes.workers:
                one.last_message_at = time.monotonic() - (500.0 if one.worker_id == "i0" else 0.0)
            harness.run.supervisor._maintain()
            harness.happen()
            assert (harness.process("i0").restart_at is not None) is lost
            assert harness.process("i1").restart_at is None


# -- admission ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "staleness", "per_step", "found"),
    [
        ("sync", 3, 2, 2),
        ("dora", 0, 2, 2),
        ("dora", 1, 2, 4),
        ("dora", 3, 2, 8),
        ("dora", 3, 3, 12),
        ("dora", "auto", 2, 4),
    ],
)
def test_mode_and_staleness_bound_limit_admission(
    base: Path, mode: str, staleness: int | str, per_step: int, found: int
) -> None:
    """With enough capacity, (K + 1) * B groups start before the first step, where K depends on the mode."""
    control = {"mode": mode, "max_staleness": staleness, "groups_per_step": per_step, "steps": 100} | EAGER
    with supervisor(base, MANY, {"control": control}) as harness:
        harness.begin(**SMALL)
        assert admitted(harness) == found


@pytest.mark.parametrize(("figures", "bound"), [({"off_policy/ess": 0.2}, 2), ({"off_policy/kl": 0.9}, 2), ({}, 4)])
def test_an_adaptive_bound_follows_what_the_trainer_measures(base: Path, figures: dict[str, float], bound: int) -> None:
    """With `control.max_staleness = "auto"`, metrics of a step change the bound when its version is published."""
    control = {"max_staleness": "auto", "max_staleness_cap": 4, "groups_per_step": 1, "steps": 100}
    with supervisor(base, ONE, {"control": control}) as harness:
        control_: Any = harness.run.supervisor._bound_control
        assert control_._adaptive.cap == 4
        harness.begin(**ROOMY)
        harness.happen(e.BoundChanged(max_staleness=4))
        control_._adaptive.bound, control_._adaptive._healthy, control_._adaptive._settling = 4, 1.0, 2
        harness.finish(harness.submits()[0])
        harness.receive("trainer", m.StepMetrics(step=0, metrics={"reward/mean": 0.0} | figures))
        harness.happen(e.Trained(step=0, attempt=1))
        assert harness.run.orchestrator.snapshot().max_staleness == 4
        harness.happen(e.Published(version=1, attempt=1, fingerprint="v1"))
        assert harness.run.orchestrator.snapshot().max_staleness == bound
        assert harness.run._state.bound == bound
        harness.run.metrics.flush()
        assert [one["off_policy/bound"] for one in lines(harness.folder.metrics)] == [4.0], "in force during the step"


def test_just_in_time_admission_begins_with_two_steps_of_groups(base: Path) -> None:
    for admission, found in (("just_in_time", 4), ("eager", 8)):
        with supervisor(base, MANY, {"control": {"admission": admission, "steps": 100}}) as harness:
            harness.begin(**SMALL)
            assert admitted(harness) == found


def test_a_step_takes_the_configured_number_of_groups(base: Path) -> None:
    """A step is applied once `groups_per_step` groups are finished."""
    with supervisor(base, ONE, {"control": {"groups_per_step": 3, "max_staleness": 1}}) as harness:
        harness.begin(**ROOMY)
        submits = harness.submits()
        for number, submit in enumerate(submits[:3]):
            assert not [one for one in harness.commands if isinstance(one, c.Apply)], number
            harness.finish(submit)
        (apply,) = [one for one in harness.commands if isinstance(one, c.Apply)]
        assert (apply.step, len(apply.groups)) == (0, 3)


def test_a_group_has_the_configured_size(base: Path) -> None:
    with supervisor(base, at("control.group_size", 3)) as harness:
        harness.begin(**ROOMY)
        assert {len(submit.requests) for submit in harness.submits()} == {3}
        numbers = [request.trajectory for request in harness.requests()]
        assert len(set(numbers)) == len(numbers)
        assert all(len({request.prompt for request in submit.requests}) == 1 for submit in harness.submits())


def test_no_more_groups_start_than_the_steps_need(base: Path) -> None:
    for steps, found in ((1, 2), (3, 6)):
        with supervisor(base, MANY, {"control": {"steps": steps} | EAGER}) as harness:
            harness.begin(**SMALL)
            assert admitted(harness) == found


def test_data_settings_determine_the_order_of_prompts(base: Path) -> None:
    """This covers `data.shuffle` and `data.seed`; the same settings give the same order."""

    def prompts(**data: Any) -> list[tuple[int, ...]]:
        with supervisor(base, ONE, {"data": data}) as harness:
            harness.begin(**ROOMY)
            rows = [harness.run.tokenization.encode(problem) for problem in harness.run.dataset.train]
            found = [submit.requests[0].prompt for submit in harness.submits()]
        assert set(found) <= set(rows)
        assert (found == rows[: len(found)]) is not data.get("shuffle", True)
        return found

    assert prompts(shuffle=False) == prompts(shuffle=False, seed=1)
    assert prompts(seed=1) == prompts(seed=1)
    assert prompts(seed=1) != prompts(seed=2)


def test_prompts_end_after_the_configured_epochs(base: Path) -> None:
    """There are no more prompts after `data.epochs` passes over `data.limit` rows."""
    control = {"steps": None, "max_staleness": 10} | EAGER
    for epochs, found in ((1, 3), (2, 6)):
        with supervisor(base, MANY, {"data": {"limit": 3, "epochs": epochs}, "control": control}) as harness:
            harness.begin(**SMALL)
            assert admitted(harness) == found
            assert len({request.prompt for request in harness.requests()}) == 3


def test_admission_reserves_the_configured_kv_room(base: Path) -> None:
    """Larger values of `kv_reserve_tokens` or `kv_headroom` admit fewer concurrent groups in the same KV cache."""

    def groups(**control: Any) -> int:
        with supervisor(base, ONE, {"control": {"kv_reserve_tokens": 8, "kv_headroom": 0.0, **control}}) as harness:
            harness.begin(max_requests=1000, kv_tokens=150)
            return admitted(harness)

    assert 0 < groups(kv_reserve_tokens=32) < groups()
    assert 0 < groups(kv_headroom=0.5) < groups()


def test_a_group_with_too_few_survivors_fails(base: Path) -> None:
    for minimum, fails in ((2, False), (3, True)):
        with supervisor(base, ONE, {"control": {"group_size": 3, "min_survivors": minimum}}) as harness:
            harness.begin(**ROOMY)
            submit = harness.submits()[0]
            harness.happen(e.TrajectoryFailed(trajectory=submit.requests[0].trajectory, reason="it failed"))
            harness.finish(m.SubmitRequests(slot=0, requests=submit.requests[1:]))
            assert any(isinstance(one, c.GroupFailed) for one in harness.commands) is fails


def test_groups_without_signal_are_replaced_only_if_configured(base: Path) -> None:
    for cap, replaced in ((0, 0), (1, 2), (2, 4)):
        control = {"dynamic_sampling": cap, "steps": None} | EAGER
        with supervisor(base, ONE, {"control": control}) as harness:
            harness.begin(**ROOMY)
            for number in range(6):
                submit = harness.submits()[number]
                harness.generated(submit)
                for request in submit.requests:
                    harness.happen(e.Scored(trajectory=request.trajectory, reward=1.0))
            ended = [one.group for one in harness.commands if isinstance(one, c.GroupWithoutSignal)]
            assert ended == list(range(replaced))
            (apply,) = [one for one in harness.commands if isinstance(one, c.Apply)]
            assert apply.groups == (replaced, replaced + 1)
            assert not any(isinstance(one, c.GroupFailed) for one in harness.commands)


def test_groups_are_streamed_only_if_configured(base: Path) -> None:
    for stream in (True, False):
        with supervisor(base, ONE, at("control.stream", stream)) as harness:
            harness.begin(**ROOMY)
            first, second, *_ = harness.submits()
            harness.finish(first)
            assert len(harness.sent_to("trainer", m.TrainGroups)) == (1 if stream else 0)
            harness.finish(second)
            assert sum(len(one.groups) for one in harness.sent_to("trainer", m.TrainGroups)) == 2


# -- deadlines ------------------------------------------------------------------------------------------------------


def _begin(orchestrator: Orchestrator, *, loaded: bool = True) -> list[c.Command]:
    """Publish version 0 and add one instance, all at time 0; return the commands issued."""
    events: list[e.Event] = [
        e.TrainerReady(version=0),
        e.PromptsArrived(prompts=tuple(Prompt(key=str(n), tokens=5) for n in range(8)), last=False),
        e.Published(version=0, attempt=1, fingerprint="v0"),
        e.InstanceJoined(spec=InstanceSpec(instance="a", max_requests=8, kv_tokens=10_000)),
    ]
    if loaded:
        events.append(e.SlotLoaded(slot=SlotId("a", 0), version=0, fingerprint="v0"))
    return [command for event in events for command in orchestrator.step(event, 0)]


def _generated(orchestrator: Orchestrator, count: int, *, scored: bool) -> Orchestrator:
    for number in range(count):
        stamp: dict[str, Any] = {"instance": "a", "version": 0, "fingerprint": "v0", "tokens": 1, "kv_tokens": 0}
        orchestrator.step(e.Generated(trajectory=number, attempt=0, **stamp), 0)
        if scored:
            orchestrator.step(e.Scored(trajectory=number, reward=float(number % 2)), 0)
    return orchestrator


@pytest.mark.parametrize(
    ("name", "happens", "asked"),
    [
        ("load", lambda one: _begin(one, loaded=False), c.EvictInstance),
        ("score", lambda one: (_begin(one), _generated(one, 1, scored=False)), c.FailTrajectory),
        (
            "tool",
            lambda one: (_begin(one), one.step(e.Parked(trajectory=0, attempt=0, kv_tokens=9), 0)),
            c.FailTrajectory,
        ),
        ("progress", _begin, c.EvictInstance),
        ("train", lambda one: (_begin(one), _generated(one, 4, scored=True)), c.RestartTrainer),
        ("stall", _begin, c.Stalled),
    ],
)
def test_a_wait_ends_at_its_deadline(base: Path, name: str, happens: Any, asked: type[c.Command]) -> None:
    """With seven seconds for this deadline and a day for all others, the command is issued at exactly seven seconds."""
    waits = ("load", "move", "score", "tool", "heartbeat", "progress", "train", "stall")
    deadlines = {one: 7.0 if one == name else 86_400.0 for one in waits}
    tree = tree_with(base, {"control": {"deadlines": deadlines, "rebalance_seconds": 86_400.0}})
    orchestrator = Orchestrator(build(RunConfig, tree).control)
    happens(orchestrator)
    early = orchestrator.step(e.Tick(), 7 * SECOND - 1)
    assert not [one for one in early if isinstance(one, asked)]
    wake = orchestrator.wake_at()
    assert wake is not None
    assert wake <= 7 * SECOND
    late = orchestrator.step(e.Tick(), 7 * SECOND)
    assert [one for one in late if isinstance(one, asked)]


# -- scoring --------------------------------------------------------------------------------------------------------


def test_the_scorer_applies_the_configured_functions_and_weights(base: Path) -> None:
    """`reward.functions` and `reward.weights` take effect in a reward worker."""

    def scored(**reward: Any) -> m.ScoreResult:
        channel: Any = RecordingChannel()
        problem = Problem(key="0", prompt="1+1=", answer="2")
        request = m.ScoreRequest(item=1, problem=problem, completion="2", tokens=(4,))
        reward_worker.serve(start(folder_of(base, {"reward": reward}), "reward"), channel, [request, m.StopWorker()])
        (found,) = channel.of(m.ScoreResult)
        assert isinstance(found, m.ScoreResult)
        return found

    assert scored(functions=["exact"]).reward == 1.0
    assert scored(functions=["exact", "format:^[0-9]$"]).reward == 2.0
    assert scored(functions=["exact", "format:^[0-9]$"], weights=[0.25, 3.0]).reward == 3.25
    assert scored(functions=["exact", "format:^[a-z]$"], weights=[0.25, 3.0]).reward == 0.25
    assert set(scored(functions=["task.py:reward"]).components) == {"reward"}


def test_reward_requests_carry_the_configured_timeout(base: Path) -> None:
    """The timeout is `reward.timeout_seconds`, or `environment.timeout_seconds` if there is an environment."""
    with supervisor(base, ONE, at("reward.timeout_seconds", 7.0)) as harness:
        harness.begin()
        harness.generated(harness.submits()[0])
        assert {one.timeout for one in harness.run.supervisor.reward.pool._waiting} == {7.0}
    with supervisor(base, ONE, TURNS, at("reward.timeout_seconds", 7.0)) as harness:
        harness.begin()
        assert {one.timeout for one in harness.run.supervisor.reward.pool._waiting} == {11.0}


def test_a_reward_worker_receives_the_configured_number_of_requests(base: Path) -> None:
    """The limit is `reward.concurrency`, or `environment.concurrency` if there is an environment."""
    with supervisor(base, ONE, at("reward.concurrency", 2)) as harness:
        harness.begin()
        for submit in harness.submits():
            harness.generated(submit)
        harness.receive("reward0", m.WorkerReady())
        assert len(harness.sent_to("reward0", m.ScoreRequest)) == 2
    with supervisor(base, ONE, TURNS, at("reward.concurrency", 2)) as harness:
        harness.begin()
        harness.receive("reward0", m.WorkerReady())
        assert len(harness.sent_to("reward0", m.EnvRequest)) == 3


# -- evaluation and metrics -----------------------------------------------------------------------------------------


def test_versions_are_evaluated_at_the_configured_interval(base: Path) -> None:
    """Every second version and the last version are evaluated."""
    changes = {"evaluation": {"every": 2}, "data": {"held_out": 2}, "control": {"steps": 5}}
    with supervisor(base, changes) as harness:
        supervisor_: Any = harness.run.supervisor
        evaluated: list[int] = []
        supervisor_.evaluation.evaluate = evaluated.append
        for version in range(6):
            supervisor_.evaluation.version_published(version)
        assert evaluated == [0, 2, 4, 5]


def test_evaluation_may_have_separate_data(base: Path) -> None:
    """Evaluation uses `evaluation.data` if set, and otherwise `data.held_out` rows of the run's data."""
    own = {"every": 1, "data": {"source": "task.py:problems", "params": {"count": 3}}}
    for evaluation, held_out, found in ((own, 2, 3), ({"every": 1}, 2, 2)):
        with supervisor(base, {"evaluation": evaluation, "data": {"held_out": held_out}}) as harness:
            evaluation_: Any = harness.run.supervisor.evaluation
            assert len(evaluation_._problems) == found


def test_accuracy_uses_the_configured_threshold(base: Path) -> None:
    """`evaluation.success_threshold` determines the accuracy in the metrics of the run."""
    changes = {"evaluation": {"every": 1, "samples": 2, "success_threshold": 0.5}, "data": {"held_out": 2}}
    with supervisor(base, changes) as harness:
        publish(harness.folder)
        harness.begin()
        harness.receive(
            "evaluator", m.RolloutReady(spec=InstanceSpec(instance="e", max_requests=4, kv_tokens=100), kernels="")
        )
        evaluation: Any = harness.run.supervisor.evaluation
        for reward in (0.49, 0.5, 0.7, 1.0):
            evaluation._scored(evaluation._running, reward)
        harness.run.metrics.flush()
        (record,) = [one for one in lines(harness.folder.metrics) if "evaluation" in one]
    assert record["eval/held_out/accuracy"] == 0.75


def test_the_configured_number_of_groups_is_written_as_samples(base: Path) -> None:
    for samples in (0, 1, 2):
        with supervisor(base, ONE, at("logging.samples", samples)) as harness:
            harness.begin(**ROOMY)
            for submit in harness.submits()[:2]:
                harness.finish(submit)
            harness.receive("trainer", m.StepMetrics(step=0, metrics={}))
            harness.run.metrics.flush()
            written = lines(harness.folder.samples) if harness.folder.samples.exists() else []
        assert len({record["group"] for record in written}) == samples
        assert len(written) == 2 * samples


SERVICE = """
import json, pathlib
_file = pathlib.Path(__file__).with_suffix(".calls")
def _record(**call):
    before = _file.read_text() if _file.exists() else ""
    _file.write_text(before + json.dumps(call) + "\\n")
def init(project, name, config): _record(project=project, seed=config["seed"])
def log(metrics): _record(**metrics)
def finish(): _record(finished=True)
"""


def test_metrics_go_to_the_configured_trackers(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.wandb` and `logging.trackio` use stub modules here; `logging.tensorboard` must write an event file."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wandb", "trackio"):
        (tmp_path / f"{name}.py").write_text(SERVICE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = folder_of(base)
    assert trackers(folder, folder.read()) == []
    for name, project in itertools.product(("wandb", "trackio"), ("mine",)):
        folder = folder_of(base, at(f"logging.{name}", project))
        for tracker in trackers(folder, folder.read()):
            tracker.log({"loss": 0.5}, 3)
            tracker.close()
        calls = [json.loads(line) for line in (tmp_path / f"{name}.calls").read_text().splitlines()]
        assert calls == [{"project": "mine", "seed": 1}, {"loss": 0.5, "version": 3}, {"finished": True}]
        del sys.modules[name]  # remove it before monkeypatch restores the previous state
    pytest.importorskip("tensorboard")
    folder = folder_of(base, at("logging.tensorboard", True))
    (tracker,) = trackers(folder, folder.read())
    tracker.log({"loss": 0.5}, 3)
    tracker.close()
    assert any(folder.tensorboard.glob("events.out.tfevents.*"))
