"""The benchmark command: it reports failures, compares fairly, and writes the page from the results files alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks import bench, page, plots, progress
from benchmarks.compare import NOISE, Spread, compare, noise
from benchmarks.machine import describe
from benchmarks.scale import exponent
from benchmarks.shared_cores import Measured, predict, sim_config
from benchmarks.training import clear_rise, seconds_to

COSTS = Measured(
    step_base=1e-3,
    per_request=1e-4,
    per_token=1e-8,
    per_generated=0.0,
    train_call=1e-3,
    train_token=2e-5,
    apply=1e-3,
    durable=1e-3,
    score=1e-3,
    publish=1e-3,
    load=1e-3,
    move=1e-3,
    decode_speed=1.0,
    train_speed=1.0,
)


def predicted(tmp_path: Path, cores: int, staleness: int = 2) -> float:
    trace = tmp_path / "trace.jsonl"
    lengths = [20, 30, 40, 400] * 20
    lines = [json.dumps({"response_tokens": n, "prompt_tokens": 7, "group": i // 4}) for i, n in enumerate(lengths)]
    trace.write_text("\n".join(lines))
    control = {
        "mode": "dora",
        "max_staleness": staleness,
        "groups_per_step": 4,
        "group_size": 4,
        "steps": 5,
        "max_response_tokens": 500,
    }
    engine = {"slots": 1, "max_requests": 16, "kv_tokens": 10_000}
    return predict(sim_config(control, engine, 3, str(trace), COSTS), COSTS, cores, 0.5).tokens_per_second


def test_processes_that_share_cores_are_slower_and_enough_cores_change_nothing(tmp_path: Path) -> None:
    # Five processes: three instances, the trainer and the supervisor.
    two, five, forty = (predicted(tmp_path, cores) for cores in (2, 5, 40))
    assert two < 0.8 * five
    assert forty == pytest.approx(five)


def test_predictions_are_deterministic(tmp_path: Path) -> None:
    assert predicted(tmp_path, 2) == predicted(tmp_path, 2)


def test_the_exponent_of_a_power_law_is_recovered() -> None:
    slope, error = exponent([1, 2, 4, 8], [3 * n**0.7 for n in (1, 2, 4, 8)])
    assert slope == pytest.approx(0.7)
    assert error == pytest.approx(0.0, abs=1e-9)


def test_time_to_an_accuracy_is_interpolated_and_never_extrapolated() -> None:
    curve = [(0, 0.0, 0.4), (4, 10.0, 0.6), (8, 20.0, 0.5), (12, 30.0, 0.7)]
    assert seconds_to(curve, 0.5) == pytest.approx(5.0)
    assert seconds_to(curve, 0.65) == pytest.approx(27.5)
    assert seconds_to(curve, 0.8) is None


def test_a_clear_rise_is_larger_than_chance() -> None:
    assert 0.08 < clear_rise(0.65, 256) < 0.09
    assert clear_rise(0.09, 64) > 0.05, "64 prompts can't show a rise from 6% to 9%"


def test_a_ratio_lies_outside_if_its_median_leaves_the_old_spread_widened_by_the_noise() -> None:
    two, one = Spread(values=[1.0, 2.0], noise=0.15), Spread(values=[1.0], noise=0.15)
    assert two.holds([1.9, 2.6])
    assert not two.holds([1.9, 2.8])
    assert two.holds([0.8, 1.0])
    assert not two.holds([0.7, 1.0])
    assert one.holds([1.14])
    assert not one.holds([1.16])
    assert Spread(values=[1.0], noise=0.3).holds([1.29])


def test_few_ratios_of_two_equal_runs_lie_outside() -> None:
    dice = random.Random(0)

    def run() -> list[list[float]]:
        return [[dice.lognormvariate(0.0, 0.2) for _ in range(2)] for _ in range(22)]

    misses = 0
    for _ in range(200):
        old, new = run(), run()
        wider = noise(old)
        misses += sum(not Spread(values=a, noise=wider).holds(b) for a, b in zip(old, new, strict=True))
    assert misses / (200 * 22) < 0.015
    assert noise([[2.0, 2.0], [3.0, 3.0]]) == noise([[1.0]]) == NOISE


def test_comparing_counts_the_ratios_that_lie_outside(tmp_path: Path) -> None:
    for name, values in (("old", [1.0, 1.1]), ("new", [2.0, 2.2])):
        folder = tmp_path / name
        folder.mkdir()
        ratios = [{"name": "same", "values": [1.0, 1.2]}, {"name": "other", "values": values}]
        (folder / "tails.json").write_text(json.dumps({"ratios": ratios}))
        (folder / "control.json").write_text(json.dumps({"ratios": [1.0, 1.1]}))  # another format, which is skipped
    assert compare(tmp_path / "old", tmp_path / "new") == 1
    assert compare(tmp_path / "old", tmp_path / "old") == 0


def test_a_progress_line_is_parsed_as_it_was_printed(capsys: pytest.CaptureFixture[str]) -> None:
    progress.tick(3, 20, "light tail, sync")
    assert progress.parse(capsys.readouterr().out) == progress.Progress(3, 20, "light tail, sync")
    assert progress.parse("3/20 of something else") is None


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary folders for results and docs."""
    monkeypatch.setattr(bench, "SETTLE", 0.0)
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for module in (bench, page):
        monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    return folder


def module(results: Path, name: str, code: str) -> bench.Part:
    """A part that runs this code."""
    (results.parent / "__init__.py").touch()
    (results.parent / f"{name}.py").write_text(code)
    return bench.Part(name=name, seconds=(1, 1))


def outcomes(results: Path) -> dict[str, Any]:
    return {one["name"]: one for one in json.loads((results / "bench.json").read_text())["parts"]}


def test_a_part_that_fails_is_reported_and_the_others_run(results: Path) -> None:
    path = results / "trl_async.json"
    good = f'import pathlib\npathlib.Path({str(path)!r}).write_text(\'{{"not run": "no server"}}\')'
    parts = [
        module(results, "training", "raise RuntimeError('the peer is missing')"),
        module(results, "tails", "pass"),
        module(results, "trl_async", good),
    ]
    bench.run(parts, quick=True, everything=True)
    found = outcomes(results)
    assert found["training"]["status"] == "failed"
    assert "the peer is missing" in found["training"]["reason"]
    assert found["tails"]["reason"] == "it wrote no results"
    assert found["trl_async"] == found["trl_async"] | {"status": "not run", "reason": "no server"}
    text = (page.DOCS / "benchmarks.md").read_text()
    assert "the peer is missing" in text
    assert "no server" in text
    assert "From a quick run" in text


def test_running_one_part_keeps_the_time_and_commit_of_the_others(results: Path) -> None:
    code = 'import pathlib\npathlib.Path({!r}).write_text(\'{{"not run": "no server"}}\')'
    parts = [module(results, name, code.format(str(results / f"{name}.json"))) for name in ("training", "tails")]
    bench.run(parts, quick=True, everything=True)
    first = json.loads((results / "bench.json").read_text())
    for one in first["parts"]:
        one |= {"when": "2026-01-31 12:00 UTC", "commit": "0badc0de"}
    (results / "bench.json").write_text(json.dumps(first))
    bench.run(parts[:1], quick=True, everything=False)
    found = outcomes(results)
    assert (found["tails"]["when"], found["tails"]["commit"]) == ("2026-01-31 12:00 UTC", "0badc0de")
    assert found["training"]["when"] > "2026-01-31 12:00 UTC"
    assert found["training"]["commit"] != "0badc0de"
    assert "2026-01-31 12:00 UTC | 0badc0de" in (page.DOCS / "benchmarks.md").read_text()


def test_a_part_that_hangs_is_stopped(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.Part, "limit", lambda self, *, quick: 1.0)
    bench.run([module(results, "scale", "import time\ntime.sleep(60)")], quick=True, everything=True)
    assert outcomes(results)["scale"]["reason"] == "not done after 1 s"


def sample_results() -> dict[str, Any]:
    """Small results of each part."""
    side = {
        "tokens": 1000,
        "seconds": 2.0,
        "steps": 2,
        "memory": 5e8,
        "median": 44,
        "p99": 571,
        "curve": [[0, 0.0, 0.4], [2, 2.0, 0.5]],
        "versions": {"trl": "1.16.0"},
    }
    cell = {
        "tokens": 900,
        "seconds": 3.0,
        "steps": 3,
        "lower_bound": 0.5,
        "occupancy": 0.9,
        "ledger": 0.05,
        "idle": {"trainer": 0.1},
        "staleness": {"0": 1.0},
    }
    aim = {"name": "speed", "target": ">= 2", "value": 2.5, "met": True}
    found = {
        "tail": "heavy",
        "variant": "sync",
        "tokens/s": 300.0,
        "predicted": 330.0,
        "error": 0.1,
        "occupancy": 0.9,
        "predicted occupancy": 0.8,
        "trainer busy": 0.2,
        "predicted trainer busy": 0.3,
    }
    growth = {"what": "a step", "along": "batch", "unit": "ms", "values": [1, 2, 4], "costs": [1.0, 1.5, 2.5]}
    check = {
        "log-prob a token of its responses": [-0.5],
        "of the float32 model's own": [-0.4],
        "first tokens that are the same": [7],
        "trusted": True,
    }
    job = {"settings": {"threads": 2}, "repeats": [{"ours": side, "trl": side | {"seconds": 20.0}, "prompts": 256}]}
    ratios = [{"name": "heavy: trained tokens/s", "values": [10.0, 11.0], "aim": 10.0}]
    tail = {"median": 44.0, "p99": 571, "mean": 80.0, "repeats": [{"sync": cell}]}
    return {
        "training": {"jobs": {"heavy": job}, "ratios": ratios},
        "tails": {"steps": 3, "batch": "8 groups of 4", "instances": 3, "tails": {"heavy": tail}, "ratios": []},
        "reality": {
            "cells": [found],
            "costs": {"apply": 1e-3},
            "details": {"processor seconds by role in a short run": {"supervisor": 1.0, "i0": 3.0}},
            "median |error|": 0.1,
            "within the aim": 1,
        },
        "scale": {"series": [growth | {"exponent": 0.6, "error": 0.01}]},
        "llama": {
            "tokens": 32,
            "threads": 2,
            "version": "0.3",
            "ours": {"1": [50.0]},
            "llama.cpp": {"1": [60.0]},
            "check": check,
            "ratios": [],
        },
        "trl_async": {"steps": [{}, {}], "seconds a step": 4.0},
        "engine": {"targets": [aim]},
        "control": {"targets": [aim]},
        "paper_table": {"targets": [aim]},
        "trainer": {"targets": [aim], "publish": {"3m": {"bytes": 1e7, "total_s": 0.02, "copy_s": 0.01}}},
    }


def test_the_page_is_written_from_the_results_alone(results: Path) -> None:
    contents = sample_results()
    for name, content in contents.items():
        (results / f"{name}.json").write_text(json.dumps(content))
    about = describe() | {"quick": False, "started": "2026-01-31 12:00 UTC", "load at the start": 0.1, "only": []}
    parts = [{"name": name, "status": "ok", "seconds": 1.0, "reason": ""} for name in contents]
    (results / "bench.json").write_text(json.dumps(about | {"seconds": 60.0, "parts": parts}))
    page.write()
    text = (page.DOCS / "benchmarks.md").read_text()
    assert set(page.TITLES) == set(page.SECTIONS) == set(contents), "a part has no section, or no sample here"
    for title in page.TITLES.values():
        assert f"## {title}" in text
    assert "10.50 (10.00 to 11.00) | at least 10 | yes" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (page.DOCS / line.partition("](")[2].rstrip(")")).stat().st_size


def test_plots_are_deterministic_svg_files_with_text(tmp_path: Path) -> None:
    band = plots.Band([0.0, 10.0, 20.0], [0.4, 0.6, 0.7], [0.0, 0.1, 0.1])
    drawn = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        plots.bars(folder / "bars.svg", "speed", {"light": {"sync": plots.Spread(2.0, 1.0, 3.0)}, "heavy": {}})
        plots.curves(folder / "curves.svg", "accuracy", {"sync": (band, band), "dora K=3": (band, band)})
        plots.predictions(folder / "predictions.svg", "tokens/s", {"light": [(90.0, 100.0)]}, 0.15)
        plots.growth(folder / "growth.svg", "costs", {"a step over batch": ([1, 2, 4], [1.0, 1.5, 2.5])})
        drawn.append({path.name: path.read_text() for path in sorted(folder.iterdir())})
    assert drawn[0] == drawn[1]
    assert "dora K=3</text>" in drawn[0]["curves.svg"]
