"""The log-prob gap between engine and trainer: a run warns of it, and stops before it publishes a doubtful version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.apps.audit import audited
from dora_rl.apps.summary import summarise
from dora_rl.apps.summary_table import rows
from dora_rl.core.config import build
from dora_rl.core.errors import RunError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.supervisor.mismatch import Mismatch, limits
from dora_rl.trainer import checkpoint
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import lines, make_run, merged, settings


def config(base: Path, **other: Any) -> RunConfig:
    return build(RunConfig, merged(settings(base), other))


def figures(gap: float, high: float | None = None, tokens: float = 1000.0) -> dict[str, float]:
    return {"mismatch_gap": gap, "mismatch_gap_p99": 3 * gap if high is None else high, "mismatch_tokens": tokens}


def test_limits_depend_on_the_coarsest_dtype(base: Path) -> None:
    assert limits(config(base)) == (0.002, 0.05)
    assert limits(config(base, model={"dtype": "float16"})) == (0.02, 0.2)
    assert limits(config(base, model={"dtype": "bfloat16"})) == (0.05, 0.3)
    assert limits(config(base, trainer={"precision": "bfloat16"})) == (0.05, 0.3)
    assert limits(config(base, model={"dtype": "bfloat16"}, mismatch={"warn": 0.1})) == (0.1, 0.3)
    assert limits(config(base, mismatch={"stop": 7.0})) == (0.002, 7.0)


def test_mean_and_percentile_can_each_raise_the_alarm(base: Path) -> None:
    notices: list[str] = []
    alarm = Mismatch(config(base), notices.append)
    assert alarm.check(0, {}) == {}, "a step without trajectories of staleness 0 measures no gap"
    assert alarm.check(0, figures(0.001)) == {"mismatch_alarm": 0.0}
    assert not notices
    assert alarm.check(1, figures(0.003)) == {"mismatch_alarm": 1.0}
    assert "step 2" in notices[0]
    assert "0.003" in notices[0]
    assert alarm.check(2, figures(0.001, high=0.021)) == {"mismatch_alarm": 1.0}
    assert alarm.check(2, figures(0.001, high=0.021, tokens=50.0)) == {"mismatch_alarm": 0.0}, (
        "too few tokens for a percentile"
    )
    assert alarm.check(3, figures(0.06)) == {"mismatch_alarm": 2.0}
    assert alarm.check(3, figures(0.001, high=0.6)) == {"mismatch_alarm": 2.0}
    assert alarm.check(3, figures(float("nan"))) == {"mismatch_alarm": 2.0}


def test_a_stop_limit_below_the_warning_limit_applies(base: Path) -> None:
    alarm = Mismatch(config(base, mismatch={"stop": 1e-4}), lambda _: None)
    assert alarm.check(0, figures(2e-4)) == {"mismatch_alarm": 2.0}
    assert alarm.check(0, figures(1e-5)) == {"mismatch_alarm": 0.0}


def test_a_constant_gap_is_reported_once_and_again_when_it_doubles(base: Path) -> None:
    notices: list[str] = []
    alarm = Mismatch(config(base), notices.append)
    for step, gap in enumerate((0.003, 0.003, 0.005, 0.007, 0.012, 0.03)):
        alarm.check(step, figures(gap))
    assert [text.split(":")[1].strip() for text in notices] == ["step 1", "step 4", "step 6"]


def test_the_error_at_the_stop_limit_names_what_to_check(base: Path) -> None:
    alarm = Mismatch(config(base), lambda _: None)
    alarm.refuse(0, figures(0.06) | {"mismatch_alarm": 1.0})
    with pytest.raises(RunError) as caught:
        alarm.refuse(0, figures(1.7) | {"mismatch_alarm": 2.0})
    for word in ("1.7", "architecture", "model.dtype", "rollout.engine.kernels", "mismatch.stop", "resume"):
        assert word in str(caught.value)


def test_a_run_warns_on_the_terminal_in_the_table_and_as_a_metric(host: Host, base: Path) -> None:
    """The kernels of engine and trainer differ in the last bits, so a limit of 1e-12 is always exceeded."""
    folder = make_run(base, "mismatch-warns", merged(settings(base, steps=2), {"mismatch": {"warn": 1e-12}}))
    run = host.start(folder)
    outcome = run.wait()
    assert broken(run, outcome, 2) == []
    assert any("the log-probs of engine and trainer differ" in notice for notice in outcome["notices"])
    steps = [line for line in lines(folder.metrics) if "step" in line]
    assert steps[0]["mismatch_alarm"] == 1.0
    assert 0 < steps[0]["mismatch_gap"] <= steps[0]["mismatch_gap_p99"]
    assert "TOO LARGE in" in dict(rows(summarise(folder)))["log-prob gap"]


def test_a_run_without_a_gap_does_not_warn(host: Host, base: Path) -> None:
    tree = merged(settings(base, "sync", steps=3), {"sampling": {"top_p": 0.8, "temperature": 0.7}})
    folder = make_run(base, "mismatch-none", tree)
    run = host.start(folder)
    outcome = run.wait()
    assert broken(run, outcome, 3) == []
    assert not any("log-probs" in notice for notice in outcome["notices"])
    steps = [line for line in lines(folder.metrics) if "step" in line]
    assert [step["mismatch_alarm"] for step in steps] == [0.0, 0.0, 0.0]
    assert "TOO LARGE" not in dict(rows(summarise(folder)))["log-prob gap"]


def test_a_run_stops_before_it_publishes_and_can_be_resumed(host: Host, base: Path) -> None:
    tree = merged(settings(base, steps=3), {"mismatch": {"warn": 1e-12, "stop": 1e-12}})
    folder = make_run(base, "mismatch-stops", tree)
    outcome = host.start(folder).wait()
    assert outcome["code"] == 1
    assert "above 'mismatch.stop' (1e-12)" in outcome["error"]
    assert checkpoint.versions(folder.checkpoints) == [0], "the doubtful version was not saved"
    found = audited(folder)
    assert found.problems == []
    assert found.steps == 0
    assert "TOO LARGE in 1 step" in dict(rows(summarise(folder)))["log-prob gap"]
    again = host.start(folder).wait()
    assert again["code"] == 1, "the cause is still there"
    run = host.start(folder, settings=["mismatch.stop=1.0", "mismatch.warn=1.0"])
    assert broken(run, run.wait(), 3) == []
