"""The learning study: its intervals are right, pairs are compared fairly, and a finished run is never repeated."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import learning, learning_report, report
from benchmarks.learning import Planned
from benchmarks.learning_analysis import (
    Evaluation,
    Interval,
    Run,
    at_equal_seconds,
    at_equal_steps,
    paired,
    score,
    score_at,
    t_quantile,
    whole_curve,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dora_rl.apps.train import read_config
from dora_rl.core.errors import ConfigError

_AFFINITY = "import json, os; print(json.dumps(list(os.sched_getaffinity(0))))"


def curve(accuracies: Iterable[float], pace: float = 1.0) -> tuple[Evaluation, ...]:
    """Evaluations every 10 steps; a step takes `pace` seconds."""
    return tuple(Evaluation(10 * index, 10 * index * pace, value) for index, value in enumerate(accuracies))


def made_up(planned: Planned, accuracies: Iterable[float] = (0.4, 0.6, 0.8, 0.9), pace: float = 1.0) -> Run:
    points = curve(accuracies, pace)
    return Run(
        job=planned.job,
        arm=planned.arm,
        seed=planned.seed,
        steps=planned.steps,
        settings=learning.ARMS[planned.arm],
        config=learning.digest(learning.JOBS[planned.job]),
        commit="0badc0de",
        cores=1,
        load=0.0,
        seconds=points[-1].seconds,
        curve=points,
        staleness=1.0,
        histogram={"0": 0.25, "1": 0.5, "2": 0.25},
        tokens_per_second=1000.0,
        means={"off_policy/ess": 0.9},
    )


def one(arm: str, seed: int, accuracies: Iterable[float], pace: float = 1.0) -> Run:
    return made_up(Planned("quickstart", arm, seed, 30), accuracies, pace)


# -- analysis -----------------------------------------------------------------------------------------------------


def test_the_interval_of_a_known_example() -> None:
    # Student's sleep data of 1908: extra hours of sleep of ten patients under two drugs. The paired interval is in
    # every textbook: mean 1.58, 95% interval 0.70 to 2.46.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    ours = [one("dora K=3", seed, [value / 100] * 4) for seed, value in enumerate(second)]
    theirs = [one("sync", seed, [value / 100] * 4) for seed, value in enumerate(first)]
    found = paired(ours, list(reversed(theirs)), at_equal_steps)
    assert found is not None
    assert found.seeds == 10
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.7001, 2.4599), abs=1e-3)


def test_the_quantiles_of_t_fall_to_that_of_the_normal() -> None:
    quantiles = [t_quantile(freedom) for freedom in range(1, 200)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert t_quantile(31) == pytest.approx(2.0395, abs=2e-4)
    assert t_quantile(100_000) == pytest.approx(1.95996, abs=1e-4)


def test_one_seed_has_no_interval() -> None:
    assert Interval.of([1.5]) == Interval(1.5, -math.inf, math.inf, 1)
    assert paired([one("dora K=3", 0, [0.5] * 4)], [one("sync", 1, [0.5] * 4)], at_equal_steps) is None


@given(noise=st.lists(st.floats(0, 0.4), min_size=2, max_size=12), gain=st.floats(-0.4, 0.4))
def test_what_a_seed_does_to_both_arms_cancels_out(noise: list[float], gain: float) -> None:
    base = [one("sync", seed, [0.4 + extra] * 4) for seed, extra in enumerate(noise)]
    ours = [one("dora K=3", seed, [0.4 + extra + gain] * 4) for seed, extra in enumerate(noise)]
    found = paired(ours, base, at_equal_steps)
    assert found is not None
    assert found[:3] == pytest.approx((100 * gain,) * 3, abs=1e-6)


def test_the_score_averages_the_last_three_evaluations_and_the_whole_curve_weighs_by_steps() -> None:
    assert score(curve([0.1, 0.2, 0.6, 0.7, 0.8])) == pytest.approx(0.7)
    assert whole_curve(curve([0.0, 1.0, 1.0])) == pytest.approx(0.75)
    uneven = (Evaluation(0, 0.0, 0.0), Evaluation(10, 1.0, 0.0), Evaluation(40, 2.0, 1.0))
    assert whole_curve(uneven) == pytest.approx(15 / 40)


def test_at_equal_seconds_both_runs_are_scored_when_the_faster_one_ends() -> None:
    fast, slow = one("dora K=3", 0, [0.4, 0.6, 0.8, 0.9]), one("sync", 0, [0.4, 0.6, 0.8, 0.9], pace=2.0)
    # After 30 s the slow run is halfway between its evaluations at 20 s and at 40 s, with scores 0.5 and 0.6.
    assert score_at(slow.curve, 30.0) == pytest.approx(0.55)
    assert at_equal_seconds(fast, slow) == pytest.approx(score(fast.curve) - 0.55)
    assert at_equal_seconds(slow, fast) == pytest.approx(0.55 - score(fast.curve))
    assert at_equal_seconds(fast, replace(slow, cores=2)) is None
    assert at_equal_seconds(fast, replace(slow, load=3.5)) is None
    assert score_at(slow.curve, -1.0) == pytest.approx(0.4)
    assert score_at(slow.curve, 1e6) == score(slow.curve)


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=10), others=st.lists(st.floats(0, 1), min_size=10))
def test_runs_of_equal_pace_differ_as_much_at_equal_seconds_as_at_equal_steps(
    values: list[float], others: list[float]
) -> None:
    first, second = one("dora K=3", 0, values), one("sync", 0, others[: len(values)])
    assert at_equal_seconds(first, second) == pytest.approx(at_equal_steps(first, second))


def test_the_aims_follow_from_the_differences() -> None:
    def met(gains: list[float]) -> dict[str, bool]:
        arms = {
            "sync": [one("sync", seed, [0.9] * 4) for seed in range(len(gains))],
            "dora K=3": [one("dora K=3", seed, [0.9 + gain] * 4) for seed, gain in enumerate(gains)],
        }
        return {target.name.partition(": ")[2]: target.met for target in learning_report.targets_of("quickstart", arms)}

    mean = "dora K=3 - sync at equal steps, mean points"
    upper = "upper end of the 95% interval of dora K=3 - sync"
    seeds = "paired seeds of dora K=3 and sync"
    assert met([0.01, -0.012] * 5) == {mean: True, upper: True, seeds: True}
    assert met([-0.003, -0.0031] * 5) == {mean: True, upper: False, seeds: True}
    assert met([0.02, -0.04] * 4) == {mean: False, upper: True, seeds: False}


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary file of runs, with temporary folders for the results."""
    path = tmp_path / "learning-runs.jsonl"
    monkeypatch.setattr(learning, "RUNS", path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(learning_report, "DOCS", tmp_path)
    return path


def test_a_study_that_is_resumed_makes_only_the_runs_that_are_missing(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = learning.plan(["quickstart", "medium"], ["sync", "dora K=3"], 2, 30)
    learning.study(wanted[:3], 1, None, made_up)
    with runs.open("a") as file:
        file.write('{"job": "quickstart", "arm"')  # a crash while writing
    made: list[Planned] = []

    def run(planned: Planned) -> Run:
        made.append(planned)
        return made_up(planned)

    learning.study(wanted, 1, None, run)
    assert made == wanted[3:]
    assert [found.seed for found in learning.load(runs)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert not learning.left(wanted, learning.load(runs))
    # Other steps or settings are another run.
    longer = [planned._replace(steps=40) for planned in wanted]
    assert learning.left(longer, learning.load(runs)) == longer
    monkeypatch.setitem(learning.ARMS, "dora K=3", {"control.max_staleness": 2})
    assert {planned.arm for planned in learning.left(wanted, learning.load(runs))} == {"dora K=3"}


def test_a_study_goes_seed_by_seed_through_all_arms_of_all_jobs() -> None:
    planned = learning.plan(["quickstart", "medium"], ["sync", "dora K=3"], 2, 30)
    assert [one.seed for one in planned] == [0] * 4 + [1] * 4
    assert [(one.job, one.arm) for one in planned[:4]] == [
        ("quickstart", "sync"),
        ("quickstart", "dora K=3"),
        ("medium", "sync"),
        ("medium", "dora K=3"),
    ]


def test_a_failed_run_is_skipped_and_tried_again_the_next_time(runs: Path) -> None:
    wanted = learning.plan(["quickstart"], ["sync", "dora K=3"], 2, 30)

    def run(planned: Planned) -> Run:
        if planned == wanted[1]:
            raise RuntimeError("the trainer failed in [/bold]")  # which is no markup of the terminal
        return made_up(planned)

    assert learning.study(wanted, 1, None, run) == [wanted[1]]
    assert learning.left(wanted, learning.load(runs)) == [wanted[1]]


def test_no_run_starts_after_the_time_is_over(runs: Path) -> None:
    wanted = learning.plan(["quickstart"], ["sync"], 2, 30)
    assert learning.study(wanted, 1, 0.0, made_up) == []
    assert learning.load(runs) == []


def test_lanes_have_equal_numbers_of_cores_and_share_none() -> None:
    (every,) = learning.lane_cores(1)
    for lanes in range(1, len(every) + 1):
        found = learning.lane_cores(lanes)
        assert len({len(cores) for cores in found}) == 1
        assert len({core for cores in found for core in cores}) == sum(map(len, found))
    with pytest.raises(SystemExit, match="use fewer lanes"):
        learning.lane_cores(len(every) + 1)


@pytest.mark.skipif(len(learning.lane_cores(1)[0]) < 2, reason="two lanes need two cores")
def test_each_lane_runs_on_its_own_cores(runs: Path) -> None:
    mine = os.sched_getaffinity(0)
    both = threading.Barrier(2)
    seen: list[frozenset[int]] = []

    def run(planned: Planned) -> Run:
        both.wait(timeout=60)
        shown = subprocess.run([sys.executable, "-c", _AFFINITY], capture_output=True, text=True, check=True)
        seen.append(frozenset(json.loads(shown.stdout)))
        return made_up(planned)

    learning.study(learning.plan(["quickstart"], ["sync", "dora K=3"], 2, 30), 2, None, run)
    first, second = set(seen)
    assert not first & second
    assert len(seen) == 4
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("job", learning.JOBS)
@pytest.mark.parametrize("arm", ["sync", "dora K=3", "dora K=7 eager", "partial K=3", "K=7 eager, decoupled PPO"])
def test_the_settings_of_arms_are_valid_for_every_job(job: str, arm: str) -> None:
    read_config(learning.JOBS[job], [f"{key}={value}" for key, value in learning.ARMS[arm].items()])


def test_an_arm_with_refused_settings_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(learning.ARMS, "wrong", {"control.max_staleness": -1})
    with pytest.raises(ConfigError):
        read_config(learning.JOBS["quickstart"], ["control.max_staleness=-1"])
    assert learning.accepted(["sync", "wrong"]) == ["sync"]


def test_the_report_is_written_from_the_recorded_runs_alone(runs: Path, tmp_path: Path) -> None:
    arms = ["sync", "dora K=3", "dora K=3 eager", "partial K=3"]
    for planned in learning.plan(["quickstart", "medium"], arms, 3, 30):
        gain = 0.01 * planned.seed if planned.arm == "dora K=3" else 0.0
        learning.append(runs, made_up(planned, [0.4, 0.6 + gain, 0.8 + gain, 0.9 + gain]))
    learning.append(runs, made_up(Planned("quickstart", "sync", 0, 40)))
    learning.report(30)
    content = json.loads((tmp_path / "learning.json").read_text())
    assert content["runs"] == 24
    steps = content["jobs"]["medium"]["minus sync"]["dora K=3"]["equal steps"]
    assert steps["mean"] == pytest.approx(1.0)
    assert steps["high"] - steps["mean"] == pytest.approx(4.303 * statistics.stdev([0, 1, 2]) / math.sqrt(3))
    (eager, fresh) = content["jobs"]["medium"]["pinning"]
    assert eager["partial minus dora"]["equal steps"]["mean"] == pytest.approx(0.0)
    assert fresh["partial minus dora"]["equal steps"]["mean"] == pytest.approx(-1.0)
    for name in ("learning.svg", "learning-medium.svg"):
        assert "dora K=3</text>" in (tmp_path / name).read_text()


def test_a_report_of_a_single_seed_is_valid_json(runs: Path, tmp_path: Path) -> None:
    learning_report.write([made_up(one) for one in learning.plan(["medium"], ["sync", "dora K=3"], 1, 30)], Console())
    text = (tmp_path / "learning.json").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
