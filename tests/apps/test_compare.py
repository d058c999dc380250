"""`dora-rl compare`: what differs between runs, and only that; the figures of each run are those of its summary."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dora_rl.apps.cli import app
from dora_rl.apps.compare import differing_settings, flatten
from dora_rl.apps.compare_page import mean_staleness, thinned
from dora_rl.apps.run_reader import read_metrics
from dora_rl.apps.summary import ACCURACY, best_version, summarise
from dora_rl.core.errors import UserError
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import MadeRun


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "160"})


@pytest.fixture
def pair(made_run: MadeRun, tmp_path: Path) -> tuple[RunDir, RunDir]:
    """A run, and a copy of it with another seed and an adapter."""
    for name in ("one", "two"):
        shutil.copytree(made_run.folder.path, tmp_path / name)
    one, two = RunDir.open(tmp_path / "one"), RunDir.open(tmp_path / "two")
    config = two.read()
    lora = {"rank": 4}
    trainer = type(config.trainer).model_validate(config.trainer.model_dump() | {"lora": lora})
    two.write(config.model_copy(update={"seed": 7, "trainer": trainer}))
    return one, two


def test_the_settings_that_differ_and_the_figures_of_each_run_are_shown(pair: tuple[RunDir, RunDir]) -> None:
    one, two = pair
    done = run(one.path, two.path)
    assert done.exit_code == 0, done.exception
    lines = [re.split(r"\s{2,}", line.strip()) for line in done.output.splitlines()]
    assert ["setting", "one", "two"] in lines
    assert ["seed", "0", "7"] in lines
    assert ["trainer.lora.rank", "-", "4"] in lines
    assert not [line for line in lines if line[0] == "control.mode"], "both have the same mode"
    summary = summarise(one)
    assert summary.accuracy is not None
    assert summary.rewards is not None
    for name, value in (
        ("tokens/s", f"{summary.tokens_per_second:,.0f}"),
        ("reward", f"{summary.rewards[0]:.3f} -> {summary.rewards[1]:.3f}"),
        ("mean staleness", f"{summary.mean_staleness:.2f}"),
        ("occupancy", f"{summary.occupancy:.0%}"),
    ):
        assert [name, value, value] in lines


def test_the_file_has_the_same_for_programs(pair: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    one, two = pair
    assert run(one.path, two.path, "--json", tmp_path / "both.json").exit_code == 0
    first, second = json.loads((tmp_path / "both.json").read_text())["runs"]
    assert (first["settings"]["seed"], second["settings"]["seed"]) == (0, 7)
    assert first["settings"].keys() == {"seed", "trainer.lora"}
    summary = summarise(one)
    assert (first["steps"], first["tokens"], first["state"]) == (summary.steps, summary.tokens, "finished")
    assert {int(age): count for age, count in first["staleness"].items()} == summary.staleness
    assert first["best"]["accuracy"] >= first["accuracy"][1]["accuracy"]


def test_runs_with_the_same_settings_say_so(made_run: MadeRun) -> None:
    done = run(made_run.folder.path, made_run.folder.path)
    assert "none differs" in done.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["RUN"], "needs two runs or more"),
        (["RUN", "nowhere"], "'nowhere' is not the folder of a run"),
        (["RUN", "MODEL"], "is not the folder of a run"),
        (["RUN", "DAMAGED"], "is damaged, or was written by another version"),
        (["RUN", "RUN", "--json", "nowhere/both.json"], "cannot write nowhere/both.json"),
    ],
)
def test_a_mistake_is_one_sentence(
    made_run: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text(json.dumps({"base": "/", "config": {}}))
    places = {
        "RUN": str(made_run.folder.path),
        "MODEL": str(made_run.config.parent / "model"),
        "DAMAGED": str(tmp_path / "damaged"),
    }
    done = run(*(places.get(one, one) for one in arguments))
    assert isinstance(done.exception, UserError)
    assert complaint in str(done.exception)
    assert "\n" not in str(done.exception)


VALUES = st.none() | st.integers(0, 2) | st.sampled_from(["a", "b"])
TREES = st.recursive(
    st.dictionaries(st.sampled_from("xyz"), VALUES),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=6,
)


@given(st.lists(TREES, min_size=2, max_size=3))
def test_a_setting_differs_exactly_if_the_trees_do(trees: list[dict[str, Any]]) -> None:
    flat = [dict(flatten(tree)) for tree in trees]
    assert bool(differing_settings(flat)) == any(tree != trees[0] for tree in trees)
    for name in set().union(*flat) - set(differing_settings(flat)):
        assert all(one[name] == flat[0][name] for one in flat)


@given(st.dictionaries(st.integers(0, 50), st.sampled_from([0.0, 0.25, 0.5])))
def test_the_best_version_is_the_first_with_the_highest_accuracy(scores: dict[int, float]) -> None:
    found = best_version({version: {ACCURACY: score} for version, score in scores.items()})
    if found is None:
        assert not scores
        return
    version, accuracy = found
    assert scores[version] == accuracy == max(scores.values())
    assert version == min(one for one, score in scores.items() if score == accuracy)


# -- the page ---------------------------------------------------------------------------------------------------


def data_of(page: Path) -> Any:
    """What is inserted into a page."""
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("const DATA = ")]
    return json.loads(line.removeprefix("const DATA = ").removesuffix(";"))


def test_the_page_has_the_tables_and_the_curves_of_all_runs(pair: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    one, two = pair
    assert run(one.path, two.path, "--page", tmp_path / "both.html").exit_code == 0
    data = data_of(tmp_path / "both.html")
    assert [shown["name"] for shown in data["runs"]] == ["one", "two"]
    assert ["seed", "0", "7"] in data["settings"]
    summary = summarise(one)
    assert ["tokens/s", *[f"{summary.tokens_per_second:,.0f}"] * 2] in data["results"]
    metrics = read_metrics(one)
    versions = [step["version"] for step in metrics.steps.values()]
    for shown in data["runs"]:
        by_version, by_second = shown["curves"]["versions"], shown["curves"]["seconds"]
        for name in ("reward", "rate", "seconds", "staleness"):
            assert [x for x, _ in by_version[name]] == versions, name
            assert len(by_second[name]) == len(versions), name
        assert [x for x, _ in by_version["accuracy"]] == list(metrics.evaluations)
        assert sum(share for _, share in shown["ages"]) == pytest.approx(1)
        mean = sum(y for _, y in by_version["staleness"]) / len(versions)
        assert mean == pytest.approx(summary.mean_staleness, abs=1e-3), "all steps have as many groups"


def test_the_page_loads_nothing_and_text_of_a_run_can_not_end_its_script(
    pair: tuple[RunDir, RunDir], tmp_path: Path
) -> None:
    one, two = pair
    name = "</script><script>alert(1)"
    two.write(two.read().model_copy(update={"out": name}))
    assert run(one.path, two.path, "--page", tmp_path / "both.html").exit_code == 0
    page = (tmp_path / "both.html").read_text()
    assert page.count("</script>") == page.count("<script>") == 1
    assert "/*include" not in page
    assert not re.findall(r"""(?:src|href)=|https?://|@import|url\(""", page)
    assert [row[2] for row in data_of(tmp_path / "both.html")["settings"] if row[0] == "out"] == [name]


def test_a_page_that_can_not_be_written_is_refused_before_runs_are_read(tmp_path: Path) -> None:
    done = run(tmp_path / "no", tmp_path / "run", "--page", tmp_path / "missing" / "both.html")
    assert isinstance(done.exception, UserError)
    assert "cannot write" in str(done.exception)


def test_long_curves_are_thinned_and_keep_their_ends() -> None:
    curve = [[float(x), 0.0] for x in range(5000)]
    short = thinned(curve)
    assert len(short) == 400
    assert [short[0], short[-1]] == [curve[0], curve[-1]]
    assert short == sorted(short)
    assert thinned(curve[:7]) == curve[:7]


def test_the_mean_staleness_of_a_step_comes_from_its_shares() -> None:
    shares = {"off_policy/staleness_0": 0.25, "off_policy/staleness_2": 0.75, "off_policy/staleness": 9.0}
    assert mean_staleness(shares) == 1.5
    assert mean_staleness({"reward/mean": 1.0}) is None
