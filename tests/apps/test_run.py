"""What the commands show of a run: a real one that was interrupted and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora_rl.apps import run_reader
from dora_rl.apps.cli import app
from dora_rl.apps.summary import summarise
from dora_rl.apps.timeline import CAUSE_COLOURS
from dora_rl.core.activities import IdleReason
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import STEPS, MadeRun


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "100"})


@pytest.fixture
def copy(made_run: MadeRun, tmp_path: Path) -> RunDir:
    shutil.copytree(made_run.folder.path, tmp_path / "runs" / "copy")
    return RunDir.open(tmp_path / "runs" / "copy")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const DATA = (.*);$", page, re.MULTILINE)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


# -- the terminal -----------------------------------------------------------------------------------------------


def test_an_interrupt_keeps_everything_and_prints_how_to_resume(made_run: MadeRun) -> None:
    assert made_run.code == 130
    assert f"resume with: dora-rl train --resume runs/{made_run.folder.path.name}" in made_run.interrupted


def test_without_a_terminal_each_step_is_a_plain_line(made_run: MadeRun) -> None:
    assert "\x1b" not in made_run.interrupted
    steps = [line for line in made_run.interrupted.splitlines() if line.startswith("steps done ")]
    assert steps
    assert all(
        re.match(rf"steps done \d/{STEPS}  reward -?\d\.\d+  .*tokens/s .*occupancy \d+%", line) for line in steps
    )


def test_a_terminal_shows_a_panel_no_wider_than_it(made_run: MadeRun) -> None:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", made_run.screen)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    for word in ("reward", "versions", "staleness", "idle slots", "trainer"):
        assert any(line.startswith(word) for line in lines), word
    assert any(re.match(rf"steps done \d/{STEPS} [━╺╸]+ starting", line) for line in lines)
    assert max(len(line) for line in lines if not line.startswith(("run /", "policy: ", "best: ", "report: "))) <= 80


def test_the_end_has_a_table_and_the_paths(made_run: MadeRun) -> None:
    assert f"{STEPS} of {STEPS}, finished" in made_run.screen
    for name in ("policy", "best", "report"):
        found = re.search(rf"^{name}: (\S+)", made_run.screen, re.MULTILINE)
        assert found is not None
        assert Path(found[1]).exists()


# -- the summary ------------------------------------------------------------------------------------------------


def test_the_summary_of_a_resumed_run_covers_the_whole_run(made_run: MadeRun) -> None:
    summary = summarise(made_run.folder)
    ledger = sqlite3.connect(made_run.folder.ledger)
    (tokens,) = ledger.execute("SELECT sum(tokens) FROM trajectories WHERE failed IS NULL").fetchone()
    (failed,) = ledger.execute("SELECT count(*) FROM trajectories WHERE failed IS NOT NULL").fetchone()
    ledger.close()
    assert (summary.steps, summary.steps_asked, summary.state) == (STEPS, STEPS, "finished")
    assert summary.tokens == tokens
    assert summary.tokens_per_second == pytest.approx(tokens / summary.seconds)
    assert sum(summary.staleness.values()) == 2 * STEPS
    assert 0 in summary.staleness, "the first step was trained before the interrupt"
    assert sum(summary.failed.values()) == failed
    assert sum(summary.slots.values()) == pytest.approx(1)
    assert 0 <= summary.occupancy < 1  # a run this short may have no window between its first and last version
    assert summary.accuracy is not None
    assert summary.accuracy[1][0] == STEPS
    assert summary.policy is not None
    assert (summary.policy / "model.safetensors").exists()


def test_reading_changes_nothing(made_run: MadeRun) -> None:
    before = {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")}
    summarise(made_run.folder)
    assert {path: path.stat().st_mtime_ns for path in made_run.folder.path.rglob("*")} == before


def test_a_run_whose_last_steps_are_missing_is_stopped(copy: RunDir) -> None:
    ledger = sqlite3.connect(copy.ledger)
    ledger.execute("UPDATE steps SET published_at = NULL WHERE step = ?", (STEPS - 1,))
    ledger.commit()
    ledger.close()
    assert summarise(copy).state == "stopped"


def test_a_run_whose_lock_is_held_is_running(copy: RunDir) -> None:
    with (copy.path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert summarise(copy).state == "running"
    assert summarise(copy).state == "finished"


# -- the page ---------------------------------------------------------------------------------------------------


def test_the_page_needs_no_network_and_generated_text_never_becomes_code(made_run: MadeRun) -> None:
    page = made_run.folder.report.read_text()
    data = data_of(page)
    assert not re.search(r"(src|href)\s*=|url\(|https?://", page)
    assert any("</script>" in one["prompt"] + one["response"] for one in run_reader.lines(made_run.folder.samples))
    assert page.count("</script") == 1
    assert page.count("<script") == 1
    assert "<!--" not in page
    assert data["samples"]


def test_the_page_has_one_row_for_each_slot_across_restarts(made_run: MadeRun) -> None:
    line = data_of(made_run.folder.report.read_text())["timeline"]
    assert [row["name"] for row in line["rows"]] == ["i0/0", "i1/0"]
    for row in [line["trainer"], *(row["runs"] for row in line["rows"])]:
        assert sum(run[0] for run in row) == line["columns"]
    assert [version for version, _ in line["published"]] == list(range(STEPS + 1))


def test_the_page_has_a_point_for_each_step(made_run: MadeRun) -> None:
    data = data_of(made_run.folder.report.read_text())
    for curve in (data["curves"]["steps"]["reward"], data["curves"]["steps"]["rate"], data["occupancy"]):
        assert [x for x, _ in curve] == list(range(1, STEPS + 1))
    assert sum(count for _, count, _ in data["lengths"]["histogram"]) == sum(
        len(some) for some in run_reader.read_facts(made_run.folder).lengths.values()
    )


def test_report_writes_the_page_again(copy: RunDir) -> None:
    copy.report.unlink()
    done = run("report", copy.path)
    assert done.exit_code == 0, done.output
    assert data_of(copy.report.read_text())["name"] == "copy"


def test_the_page_of_a_run_that_has_just_started_can_be_written(copy: RunDir) -> None:
    for path in (copy.metrics, copy.activity, copy.samples, copy.ledger):
        path.unlink()
    assert run("report", copy.path).exit_code == 0
    assert summarise(copy).steps == 0


# -- runs -------------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_and_a_damaged_one_does_not_hide_the_others(copy: RunDir) -> None:
    newer = copy.path.parent / "a-newer"
    shutil.copytree(copy.path, newer)
    broken = copy.path.parent / "broken"
    shutil.copytree(copy.path, broken)
    (broken / "ledger.db").write_bytes(b"nonsense" * 200)
    for number, path in enumerate((copy.path, newer, broken)):
        os.utime(path / "config.json", (1e9 + number, 1e9 + number))
    done = run("runs", copy.path.parent)
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines() if "dora" in line or "unreadable" in line]
    assert [row[0] for row in rows] == ["broken", "a-newer", "copy"]
    assert rows[0][-1] == "unreadable"
    assert rows[1][1:4] == ["dora", "2", f"{STEPS}/{STEPS}"]
    assert rows[1][-1] == "finished"


def test_the_error_names_a_missing_folder(tmp_path: Path) -> None:
    done = run("runs", tmp_path / "none")
    assert isinstance(done.exception, UserError)
    assert "none" in str(done.exception)


# -- eval -------------------------------------------------------------------------------------------------------


def test_eval_agrees_with_the_runs_own_evaluation(copy: RunDir) -> None:
    done = run("eval", copy.path)
    assert done.exit_code == 0, done.output
    result = json.loads((copy.path / "evaluations" / f"version-{STEPS:08d}.json").read_text())
    own = run_reader.read_metrics(copy).evaluations[STEPS]
    assert result["accuracy"] == pytest.approx(own["eval/held_out/accuracy"])
    assert result["reward"] == pytest.approx(own["eval/held_out/reward"])
    assert result["mean_tokens"] == pytest.approx(own["eval/held_out/response_length"])
    assert result["failed"] == own["eval/held_out/failed"]
    assert (result["prompts"], result["samples"], result["version"]) == (6, 2, STEPS)
    low, high = result["interval_95"]
    assert low <= result["avg@2"] <= high
    assert f"accuracy {result['accuracy']:.1%}" in done.output


def test_eval_of_a_model_uses_the_data_of_a_config(made_run: MadeRun, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    model = made_run.config.parent / "model"
    done = run("eval", model, "--config", made_run.config, "--samples", "1", "--json", out)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["samples"] == 1


def test_eval_uses_the_prompts_that_the_run_would_use(made_run: MadeRun) -> None:
    folder = made_run.config.parent
    rows = (folder / "problems.jsonl").read_text().splitlines()[:4]
    (folder / "own.jsonl").write_text("\n".join(rows))
    config = folder / "own.toml"
    config.write_text(made_run.config.read_text().replace("held_out.jsonl", "own.jsonl"))
    out = folder / "own.json"
    done = run("eval", folder / "model", "--config", config, "--json", out)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["prompts"] == 4


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["MODEL"], "--config"), (["RUN", "--version", "77"], "has no checkpoint of version 77; it has: 0, ")],
)
def test_eval_reports_what_is_missing(made_run: MadeRun, arguments: list[str], complaint: str) -> None:
    paths = {"MODEL": str(made_run.config.parent / "model"), "RUN": str(made_run.folder.path)}
    done = run("eval", *[paths.get(one, one) for one in arguments])
    assert isinstance(done.exception, UserError)
    assert complaint in str(done.exception)


def test_eval_reports_an_unwritable_result_before_it_starts(
    made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.apps.evaluate.respond", lambda *_: pytest.fail("it started"))
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file" / "result.json"):
        done = run("eval", made_run.folder.path, "--json", out)
        assert isinstance(done.exception, UserError)
        assert f"cannot write {out}" in str(done.exception)


def test_eval_without_reward_functions_is_refused(
    made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_rl.apps.evaluate.respond", lambda *_: pytest.fail("it started"))
    config = made_run.folder.read()
    without = config.model_copy(update={"reward": config.reward.model_copy(update={"functions": ()})})
    monkeypatch.setattr("dora_rl.runtime.run_dir.RunDir.read", lambda _: without)
    done = run("eval", made_run.folder.path, "--json", tmp_path / "result.json")
    assert isinstance(done.exception, UserError)
    assert "'reward.functions' is empty" in str(done.exception)


# -- the documents ----------------------------------------------------------------------------------------------


def test_every_metric_is_in_the_glossary(made_run: MadeRun) -> None:
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    known: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = first.rpartition("/")[0]
        known |= {first, *others, *(first + other for other in others), *(f"{folder}/{other}" for other in others)}
    metrics = run_reader.read_metrics(made_run.folder)
    names = {name for record in metrics.steps.values() for name in record} - {"step", "version", "time"}
    assert not any(" " in name for name in names)
    idle = {name.removeprefix("idle/") for name in names if name.startswith("idle/")}
    assert idle <= {reason.tag for reason in IdleReason}
    for pattern, general in (
        (r"staleness_\d+", "staleness_N"),
        (r"^idle/.*", "idle/CAUSE"),
        (r"^reward/.*/", "reward/NAME/"),
    ):
        names = {re.sub(pattern, general, name) for name in names}
    assert names - known == set()
    causes = set(re.findall(r"^\| `([a-z_]+)` \|", text.partition("### Idle causes")[2], re.MULTILINE))
    assert causes == {reason.tag for reason in IdleReason}


def test_each_idle_cause_has_its_own_colour(made_run: MadeRun) -> None:
    assert set(CAUSE_COLOURS) == set(IdleReason)
    assert len(set(CAUSE_COLOURS.values())) == len(IdleReason)
    drawn = data_of(made_run.folder.report.read_text())["timeline"]["causes"]
    assert drawn == {reason.value: CAUSE_COLOURS[reason] for reason in IdleReason}
