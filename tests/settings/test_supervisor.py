"""Settings of the supervisor: from the config file to what it asks of its processes, and when."""

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
from dora_rl.runtime.workers import reward as judge
from tests.runtime.making import lines
from tests.settings.workers import Line, SupervisorPart, at, folder_of, publish, start, supervisor, tree_with

ROOMY = {"max_requests": 1000, "kv_tokens": 1_000_000}
MANY, SMALL = at("rollout.instances", 16), {"max_requests": 2, "kv_tokens": 1000}
"""More instances than groups: one that has nothing to do gets a group as long as the rules allow one."""
ONE = at("rollout.instances", 1)
TURNS = {"environment": {"kind": "turns.py:Turns", "timeout_seconds": 11.0, "concurrency": 3}}


def admitted(part: SupervisorPart) -> int:
    """Groups that were begun."""
    return len(part.submits())


# -- who is there ---------------------------------------------------------------------------------------------------


def test_there_are_as_many_processes_as_asked_for(base: Path) -> None:
    changes = {"rollout": {"instances": 3}, "reward": {"workers": 2}, "trainer": {"ranks": 2}}
    with supervisor(base, changes) as part:
        assert sorted(part.backend.seats) == ["i0", "i1", "i2", "rank1", "reward0", "reward1", "trainer"]
        told = part.told("rank1", m.StartWorker)[0]
        assert (told.rank, told.ranks) == (1, 2)


def test_cores_are_shared_as_far_as_threads_go(base: Path) -> None:
    """The host of these tests has 8 cores; the only instance has all of them while the trainer waits."""
    for threads, found in ((3, 3), (0, 8)):
        with supervisor(base, ONE, at("threads", threads)) as part:
            part.begin()
            assert part.told("i0", m.SetThreads)[-1].count == found


def test_the_run_is_where_it_was_told_to_be(base: Path, tmp_path: Path) -> None:
    """`out` and `weights`."""
    folder = folder_of(base, at("out", str(tmp_path / "elsewhere")), at("weights", "memory"))
    assert folder.path.parent == tmp_path / "elsewhere"
    publish(folder)
    assert not folder.weights.exists()
    assert (Path("/dev/shm") / f"dora-rl-{folder.memory}").is_dir()
    folder.store(folder.read()).clear()
    folder = folder_of(base)
    publish(folder)
    assert any(folder.weights.iterdir())


def test_a_process_is_restarted_as_often_and_as_late_as_told(base: Path) -> None:
    with supervisor(base, {"supervision": {"restarts": 2, "backoff_seconds": 100.0}}) as part:
        world: Any = part.run.supervisor
        process = part.process("i0")
        for pause in (100.0, 200.0):
            before = time.monotonic()
            world.worker_lost(process, "it is lost")
            assert before + pause <= process.restart_at <= time.monotonic() + pause
            assert not process.given_up
        world.worker_lost(process, "it is lost")
        assert process.given_up


def test_an_instance_that_is_silent_for_a_heartbeat_is_lost(base: Path) -> None:
    for heartbeat, lost in ((50.0, True), (5000.0, False)):
        with supervisor(base, at("control.deadlines.heartbeat", heartbeat)) as part:
            part.begin()
            for one in part.run.supervisor._processes.workers:
                one.last_message_at = time.monotonic() - (500.0 if one.worker_id == "i0" else 0.0)
            part.run.supervisor._maintain()
            part.happen()
            assert (part.process("i0").restart_at is not None) is lost
            assert part.process("i1").restart_at is None


# -- what is begun --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "staleness", "per_step", "found"),
    [("sync", 3, 2, 2), ("dora", 0, 2, 2), ("dora", 1, 2, 4), ("dora", 3, 2, 8), ("dora", 3, 3, 12)],
)
def test_groups_are_admitted_as_mode_and_bound_say(
    base: Path, mode: str, staleness: int, per_step: int, found: int
) -> None:
    """With room for all, (K + 1) * B groups are begun before the first step, with the K of the mode."""
    control = {"mode": mode, "max_staleness": staleness, "groups_per_step": per_step, "steps": 100}
    with supervisor(base, MANY, {"control": control}) as part:
        part.begin(**SMALL)
        assert admitted(part) == found


def test_a_step_takes_so_many_groups(base: Path) -> None:
    """`groups_per_step`, and the step that is trained then."""
    with supervisor(base, ONE, {"control": {"groups_per_step": 3, "max_staleness": 1}}) as part:
        part.begin(**ROOMY)
        submits = part.submits()
        for number, submit in enumerate(submits[:3]):
            assert not [one for one in part.commands if isinstance(one, c.Apply)], number
            part.finish(submit)
        (apply,) = [one for one in part.commands if isinstance(one, c.Apply)]
        assert (apply.step, len(apply.groups)) == (0, 3)


def test_a_group_has_so_many_siblings(base: Path) -> None:
    with supervisor(base, at("control.group_size", 3)) as part:
        part.begin(**ROOMY)
        assert {len(submit.requests) for submit in part.submits()} == {3}
        numbers = [request.trajectory for request in part.requests()]
        assert len(set(numbers)) == len(numbers)
        assert all(len({request.prompt for request in submit.requests}) == 1 for submit in part.submits())


def test_no_more_groups_than_the_steps_need(base: Path) -> None:
    for steps, found in ((1, 2), (3, 6)):
        with supervisor(base, MANY, at("control.steps", steps)) as part:
            part.begin(**SMALL)
            assert admitted(part) == found


def test_prompts_come_in_the_order_of_the_data_settings(base: Path) -> None:
    """`data.shuffle` and `data.seed`; the same settings give the same order."""

    def asked(**data: Any) -> list[tuple[int, ...]]:
        with supervisor(base, ONE, {"data": data}) as part:
            part.begin(**ROOMY)
            rows = [part.run.tokenization.encode(problem) for problem in part.run.dataset.train]
            found = [submit.requests[0].prompt for submit in part.submits()]
        assert set(found) <= set(rows)
        assert (found == rows[: len(found)]) is not data.get("shuffle", True)
        return found

    assert asked(shuffle=False) == asked(shuffle=False, seed=1)
    assert asked(seed=1) == asked(seed=1)
    assert asked(seed=1) != asked(seed=2)


def test_prompts_end_with_their_epochs(base: Path) -> None:
    """`data.epochs` passes over `data.limit` rows, then there are no more."""
    control = {"steps": None, "max_staleness": 10}
    for epochs, found in ((1, 3), (2, 6)):
        with supervisor(base, MANY, {"data": {"limit": 3, "epochs": epochs}, "control": control}) as part:
            part.begin(**SMALL)
            assert admitted(part) == found
            assert len({request.prompt for request in part.requests()}) == 3


def test_admission_leaves_room_as_told(base: Path) -> None:
    """`kv_reserve_tokens` and `kv_headroom`: more of either, fewer groups at once in the same room."""

    def groups(**control: Any) -> int:
        with supervisor(base, ONE, {"control": {"kv_reserve_tokens": 8, "kv_headroom": 0.0, **control}}) as part:
            part.begin(max_requests=1000, kv_tokens=150)
            return admitted(part)

    assert 0 < groups(kv_reserve_tokens=32) < groups()
    assert 0 < groups(kv_headroom=0.5) < groups()


def test_a_group_with_too_few_survivors_fails(base: Path) -> None:
    for least, fails in ((2, False), (3, True)):
        with supervisor(base, ONE, {"control": {"group_size": 3, "min_survivors": least}}) as part:
            part.begin(**ROOMY)
            submit = part.submits()[0]
            part.happen(e.TrajectoryFailed(trajectory=submit.requests[0].trajectory, reason="it failed"))
            part.finish(m.SubmitRequests(slot=0, requests=submit.requests[1:]))
            assert any(isinstance(one, c.GroupFailed) for one in part.commands) is fails


def test_groups_are_streamed_only_if_told(base: Path) -> None:
    for stream in (True, False):
        with supervisor(base, ONE, at("control.stream", stream)) as part:
            part.begin(**ROOMY)
            first, second, *_ = part.submits()
            part.finish(first)
            assert len(part.told("trainer", m.TrainGroups)) == (1 if stream else 0)
            part.finish(second)
            assert sum(len(one.groups) for one in part.told("trainer", m.TrainGroups)) == 2


# -- deadlines ------------------------------------------------------------------------------------------------------


def _begin(orchestrator: Orchestrator, *, loaded: bool = True) -> list[c.Command]:
    """Version 0 is out and one instance is there, all at time 0; what was asked for."""
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
    """Seven seconds for this wait and a day for all others: at the seventh something is done, and not before."""
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


# -- judging --------------------------------------------------------------------------------------------------------


def test_the_judge_weighs_functions_as_told(base: Path) -> None:
    """`reward.functions` and `reward.weights`, as a judge's process hears them."""

    def judged(**reward: Any) -> m.ScoreResult:
        line: Any = Line()
        problem = Problem(key="0", prompt="1+1=", answer="2")
        question = m.ScoreRequest(item=1, problem=problem, completion="2", tokens=(4,))
        judge.serve(start(folder_of(base, {"reward": reward}), "reward"), line, [question, m.StopWorker()])
        (found,) = line.of(m.ScoreResult)
        assert isinstance(found, m.ScoreResult)
        return found

    assert judged(functions=["exact"]).reward == 1.0
    assert judged(functions=["exact", "format:^[0-9]$"]).reward == 2.0
    assert judged(functions=["exact", "format:^[0-9]$"], weights=[0.25, 3.0]).reward == 3.25
    assert judged(functions=["exact", "format:^[a-z]$"], weights=[0.25, 3.0]).reward == 0.25
    assert set(judged(functions=["task.py:reward"]).components) == {"reward"}


def test_a_question_is_due_after_its_timeout(base: Path) -> None:
    """`reward.timeout_seconds`, and `environment.timeout_seconds` where there is an environment."""
    with supervisor(base, ONE, at("reward.timeout_seconds", 7.0)) as part:
        part.begin()
        part.generated(part.submits()[0])
        assert {one.timeout for one in part.run.supervisor.reward.pool._waiting} == {7.0}
    with supervisor(base, ONE, TURNS, at("reward.timeout_seconds", 7.0)) as part:
        part.begin()
        assert {one.timeout for one in part.run.supervisor.reward.pool._waiting} == {11.0}


def test_a_judge_is_asked_so_many_questions_at_once(base: Path) -> None:
    """`reward.concurrency`, or `environment.concurrency` where there is an environment."""
    with supervisor(base, ONE, at("reward.concurrency", 2)) as part:
        part.begin()
        for submit in part.submits():
            part.generated(submit)
        part.hear("reward0", m.WorkerReady())
        assert len(part.told("reward0", m.ScoreRequest)) == 2
    with supervisor(base, ONE, TURNS, at("reward.concurrency", 2)) as part:
        part.begin()
        part.hear("reward0", m.WorkerReady())
        assert len(part.told("reward0", m.EnvRequest)) == 3


# -- evaluation and figures -----------------------------------------------------------------------------------------


def test_versions_are_evaluated_as_often_as_told(base: Path) -> None:
    """Each second version, and the last."""
    changes = {"evaluation": {"every": 2}, "data": {"held_out": 2}, "control": {"steps": 5}}
    with supervisor(base, changes) as part:
        world: Any = part.run.supervisor
        asked: list[int] = []
        world.evaluation.evaluate = asked.append
        for version in range(6):
            world.evaluation.version_published(version)
        assert asked == [0, 2, 4, 5]


def test_evaluation_may_have_data_of_its_own(base: Path) -> None:
    """`evaluation.data`; otherwise `data.held_out` rows of the run's own."""
    own = {"every": 1, "data": {"source": "task.py:problems", "params": {"count": 3}}}
    for evaluation, held_out, found in ((own, 2, 3), ({"every": 1}, 2, 2)):
        with supervisor(base, {"evaluation": evaluation, "data": {"held_out": held_out}}) as part:
            evaluation_: Any = part.run.supervisor.evaluation
            assert len(evaluation_._problems) == found


def test_what_counts_as_right_is_as_told(base: Path) -> None:
    """`evaluation.success_threshold`, in the figures of the run."""
    changes = {"evaluation": {"every": 1, "samples": 2, "success_threshold": 0.5}, "data": {"held_out": 2}}
    with supervisor(base, changes) as part:
        publish(part.folder)
        part.begin()
        part.hear(
            "evaluator", m.RolloutReady(spec=InstanceSpec(instance="e", max_requests=4, kv_tokens=100), kernels="")
        )
        evaluation: Any = part.run.supervisor.evaluation
        for reward in (0.49, 0.5, 0.7, 1.0):
            evaluation._scored(evaluation._running, reward)
        part.run.metrics.flush()
        (record,) = [one for one in lines(part.folder.metrics) if "evaluation" in one]
    assert record["eval/held_out/accuracy"] == 0.75


def test_so_many_groups_are_written_as_samples(base: Path) -> None:
    for samples in (0, 1, 2):
        with supervisor(base, ONE, at("logging.samples", samples)) as part:
            part.begin(**ROOMY)
            for submit in part.submits()[:2]:
                part.finish(submit)
            part.hear("trainer", m.StepMetrics(step=0, metrics={}))
            part.run.metrics.flush()
            written = lines(part.folder.samples) if part.folder.samples.exists() else []
        assert len({record["group"] for record in written}) == samples
        assert len(written) == 2 * samples


SERVICE = """
import json, pathlib
_file = pathlib.Path(__file__).with_suffix(".said")
def _say(**said):
    before = _file.read_text() if _file.exists() else ""
    _file.write_text(before + json.dumps(said) + "\\n")
def init(project, name, config): _say(project=project, seed=config["seed"])
def log(figures): _say(**figures)
def finish(): _say(finished=True)
"""


def test_figures_go_where_logging_says(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.tensorboard`, `logging.wandb`, `logging.trackio`; the services are modules that note their calls."""
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
        said = [json.loads(line) for line in (tmp_path / f"{name}.said").read_text().splitlines()]
        assert said == [{"project": "mine", "seed": 1}, {"loss": 0.5, "version": 3}, {"finished": True}]
        del sys.modules[name]  # before the undoing of what was done above
    pytest.importorskip("tensorboard")
    folder = folder_of(base, at("logging.tensorboard", True))
    (tracker,) = trackers(folder, folder.read())
    tracker.log({"loss": 0.5}, 3)
    tracker.close()
    assert any(folder.tensorboard.glob("events.out.tfevents.*"))
