"""CSV tables and Prometheus metrics of a run: everything that the ledger has, once, and readable by others."""

from __future__ import annotations

import csv
import fcntl
import json
import math
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from dora_rl.apps import run_reader
from dora_rl.apps.cli import app
from dora_rl.apps.exports import csv_tables
from dora_rl.apps.exports.prometheus import Family, RunMetrics, Sample, exposition, prometheus_text
from dora_rl.apps.summary import summarise, totals
from dora_rl.apps.tail import TailedFile
from dora_rl.core.errors import UserError
from dora_rl.core.types import SECOND
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import STEPS, MadeRun

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "observability.md").read_text()


@pytest.fixture
def copy(made_run: MadeRun, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(made_run.folder.path, tmp_path / "copy"))


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"})


# -- CSV --------------------------------------------------------------------------------------------------------


def test_the_tables_have_every_step_group_and_trajectory(
    made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_tables, "_PAGE", 3)
    done = run("export", made_run.folder.path, "--to", "csv", tmp_path / "new" / "tables")
    assert done.exit_code == 0, done.output
    out = tmp_path / "new" / "tables"
    assert sorted(path.name for path in out.iterdir()) == [
        "evaluations.csv",
        "groups.csv",
        "metrics.csv",
        "trajectories.csv",
    ]
    recorded = run_reader.read_metrics(made_run.folder)
    steps = rows(out / "metrics.csv")
    assert [int(row["step"]) for row in steps] == list(range(STEPS))
    for row in steps:
        known = {name: float(value) for name, value in row.items() if value}
        assert known == pytest.approx(recorded.steps[int(row["step"])], nan_ok=True, abs=0, rel=0)
    assert [int(row["evaluation"]) for row in rows(out / "evaluations.csv")] == list(recorded.evaluations)
    ledger = sqlite3.connect(made_run.folder.ledger)
    groups, trajectories = rows(out / "groups.csv"), rows(out / "trajectories.csv")
    expected = ledger.execute('SELECT id, "group", tokens, reward, failed FROM trajectories ORDER BY id').fetchall()
    ledger.close()
    names = ("trajectory", "group", "tokens", "reward", "failed")
    assert [tuple(row[name] for name in names) for row in trajectories] == [
        tuple("" if value is None else str(value) for value in row) for row in expected
    ]
    summary = summarise(made_run.folder)
    trained = [row for row in groups if row["outcome"] == "trained"]
    assert len(groups) == summary.groups
    for age, count in summary.staleness.items():
        assert sum(row["staleness"] == str(age) for row in trained) == count
    assert "two [bold] twos" in "".join(row["failed"] for row in trajectories)


def test_outcomes_of_groups(copy: RunDir, tmp_path: Path) -> None:
    with sqlite3.connect(copy.ledger) as ledger:
        ledger.execute("UPDATE groups SET step = NULL, failure = 'a \"quoted\",\nreason' WHERE id = 0")
        ledger.execute("UPDATE groups SET step = NULL, no_signal = 0.5 WHERE id = 1")
        ledger.execute("UPDATE groups SET step = NULL WHERE id = 2")
        ledger.execute("UPDATE steps SET published_at = NULL WHERE step = ?", (STEPS - 1,))
    ledger.close()
    csv_tables.write_tables(copy, tmp_path / "out")
    found = rows(tmp_path / "out" / "groups.csv")
    assert [row["outcome"] for row in found[:3]] == ["failed", "without signal", "open"]
    assert found[0]["failure"] == 'a "quoted",\nreason'
    assert found[1]["equal_reward"] == "0.5"
    last = {row["outcome"] for row in found if row["step"] == str(STEPS - 1)}
    assert last == {"in training"}


@pytest.mark.parametrize(
    ("options", "complaint"), [(["--window", "0:1"], "--window is for traces"), ([], "cannot write to")]
)
def test_a_mistake_with_csv_is_one_sentence(
    made_run: MadeRun, tmp_path: Path, options: list[str], complaint: str
) -> None:
    (tmp_path / "file").write_text("kept")
    done = run("export", made_run.folder.path, "--to", "csv", tmp_path / "file", *options)
    assert isinstance(done.exception, UserError)
    assert complaint in str(done.exception)
    assert (tmp_path / "file").read_text() == "kept"


# -- Prometheus -------------------------------------------------------------------------------------------------


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples by name and labels, without the run; each has its own family with a help text."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if family.type == "counter" else "")
            labels = frozenset((key, value) for key, value in sample.labels.items() if key != "run")
            assert (sample.name, labels) not in found, "a sample that is there twice"
            found[sample.name, labels] = sample.value
    return found


def value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def test_the_metrics_are_those_of_the_summary(made_run: MadeRun) -> None:
    samples = parsed(prometheus_text(made_run.folder))
    summary = summarise(made_run.folder)
    assert value(samples, "dora_rl_steps_total") == value(samples, "dora_rl_steps_asked") == STEPS
    assert value(samples, "dora_rl_running") == 0
    assert value(samples, "dora_rl_groups_admitted_total") == summary.groups
    assert value(samples, "dora_rl_groups_ended_total", outcome="trained") == 2 * STEPS
    assert value(samples, "dora_rl_groups_untrained") == 0
    assert value(samples, "dora_rl_tokens_trained_total") == summary.tokens
    ledger = sqlite3.connect(made_run.folder.ledger)
    (tokens, complete) = ledger.execute("SELECT sum(tokens), count(tokens) FROM trajectories").fetchone()
    ledger.close()
    assert value(samples, "dora_rl_tokens_generated_total") == tokens
    assert value(samples, "dora_rl_trajectories_generated_total") == complete
    assert value(samples, "dora_rl_trajectories_failed_total") == sum(summary.failed.values()) > 0
    for age, count in summary.staleness.items():
        assert value(samples, "dora_rl_groups_trained_total", staleness=str(age)) == count
    for worker, count in summary.restarts.items():
        assert value(samples, "dora_rl_processes_lost_total", worker=worker) == count
    last = run_reader.read_metrics(made_run.folder).steps[STEPS - 1]
    assert value(samples, "dora_rl_step_metric", metric="reward/mean") == last["reward/mean"]
    assert value(samples, "dora_rl_evaluated_version") == STEPS
    assert summary.accuracy is not None
    accuracy = value(samples, "dora_rl_evaluation_metric", metric="eval/held_out/accuracy")
    assert accuracy == summary.accuracy[1][1]


def test_the_time_by_cause_is_complete(made_run: MadeRun) -> None:
    samples = parsed(prometheus_text(made_run.folder))
    for name, account in zip(
        ("dora_rl_slot_seconds_total", "dora_rl_trainer_seconds_total"),
        totals(run_reader.read_activity(made_run.folder).windows),
        strict=True,
    ):
        for activity, spent in account.items():
            label, _, cause = activity.partition(": ")
            assert value(samples, name, activity=label, cause=cause) == pytest.approx(spent / SECOND)
        assert sum(one == name for one, _ in samples) == len(account)


def test_a_run_that_goes_on_is_read_further(copy: RunDir) -> None:
    """Two scrapes while the files grow give the same as one scrape of the whole."""
    whole = prometheus_text(copy)
    for file in (copy.metrics, copy.activity):
        file.rename(file.with_suffix(".whole"))
    live = RunMetrics(copy)
    samples = parsed(live.text())
    assert not any(name.endswith("seconds_total") for name, _ in samples)
    for share in (0.3, 0.77, 1.0):
        for file in (copy.metrics, copy.activity):
            data = file.with_suffix(".whole").read_bytes()
            file.write_bytes(data[: round(share * len(data))])  # it may end in the middle of a line
        text = live.text()
    assert text == whole


def test_a_running_run_says_so_and_one_without_a_ledger_has_metrics_too(copy: RunDir) -> None:
    with copy.lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert value(parsed(prometheus_text(copy)), "dora_rl_running") == 1
    copy.ledger.unlink()
    assert ("dora_rl_steps_total", frozenset()) not in parsed(prometheus_text(copy))


@settings(max_examples=40, deadline=None)
@given(label=st.text(st.characters(codec="utf-8")), number=st.floats(), note=st.text(st.characters(codec="utf-8")))
def test_any_text_and_number_is_read_back(label: str, number: float, note: str) -> None:
    family = Family("name", "gauge", note, [Sample(number, {"key": label})])
    (found,) = text_string_to_metric_families("".join(exposition([family], {"run": label})))
    (sample,) = found.samples
    assert sample.labels == {"key": label, "run": label}
    assert sample.value == number or (math.isnan(number) and math.isnan(sample.value))
    # The parser strips white space around a help text.
    assert found.documentation.strip() == note.strip() or not note.isprintable()


# -- the page ---------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_work(copy: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    copy.path.rename(tmp_path / "runs" / "20260131-120000")
    lines = re.findall(r"^    dora-rl (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    for line in lines:
        done = run(*line.replace("600:660", "1:60").split())
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert {"run.pftrace.gz", "part.pftrace", "tables"} <= {path.name for path in tmp_path.iterdir()}


def test_the_page_names_every_metric_for_prometheus(made_run: MadeRun) -> None:
    documented = {name.partition("{")[0] for name in re.findall(r"`(dora_rl_[a-z_]+(?:\{[^`]*)?)`", PAGE)}
    assert documented == {name for name, _ in parsed(prometheus_text(made_run.folder))} | {
        "dora_rl_processes_lost_total"  # no process of this run was lost
    }


def test_the_readme_links_to_the_page() -> None:
    assert "(docs/observability.md)" in (ROOT / "README.md").read_text()


# -- files that grow --------------------------------------------------------------------------------------------


def test_a_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    tailed = TailedFile(file)
    assert list(tailed.records()) == []
    file.write_text('{"a": 1}\n{"a": 2')
    assert list(tailed.records()) == [{"a": 1}]
    with file.open("a") as opened:
        opened.write('2}\n{"broken\n[1]\n')
    assert list(tailed.records()) == [{"a": 22}]
    file.write_text(f"{json.dumps({'a': 1})}\n")  # a resumed run has removed half a line
    assert list(tailed.records()) == []
