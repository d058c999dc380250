"""Versions, Training, Trajectories and System, on a small real run whose responses contain hostile text."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dora_rl.apps.run_reader import lines, read_metrics
from dora_rl.apps.serve.live_run import LiveRun
from dora_rl.apps.serve.versions import ladder
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import STEPS
from tests.serve.conftest import client_of, get

if TYPE_CHECKING:
    from starlette.testclient import TestClient

API = "/api/runs/small"


# -- versions -------------------------------------------------------------------------------------------------------


def test_every_admitted_group_is_accounted_for(client: TestClient, runs: Path) -> None:
    data = get(client, f"{API}/versions")
    counts = data["conservation"]
    with sqlite3.connect(runs / "small" / "ledger.db") as ledger:
        (groups,) = ledger.execute("SELECT count(*) FROM groups").fetchone()
        (trained,) = ledger.execute("SELECT count(*) FROM groups WHERE step IS NOT NULL").fetchone()
    assert counts["admitted"] == groups
    assert counts["trained"] == trained == 2 * STEPS == sum(count for _, count in data["staleness"])
    assert counts["admitted"] == sum(count for name, count in counts.items() if name != "admitted")
    assert sum(one["groups"] for one in data["live"]) == counts["running"]
    for _, due, room in data["ladder"]:
        assert due >= 0 <= room


def test_the_ladder_counts_what_is_due_against_what_steps_take(runs: Path) -> None:
    run = LiveRun(RunDir.open(runs / "small"))  # a bound of 2, two groups per step
    assert ladder(run, [(9, 3, 10), (10, 3, 20), (11, 4, 30)], 4) == [(5, 2, 4), (6, 3, 6)]
    run.notes.append({"note": "bound", "at": 25, "before": 2, "after": 4})
    assert ladder(run, [(9, 3, 10), (10, 3, 20), (11, 4, 30)], 5) == [(5, 2, 2), (8, 3, 8)]
    assert ladder(run, [(9, 1, 10)], 4) == [(3, 1, 0)], "an overdue group has no room"


# -- training -------------------------------------------------------------------------------------------------------


def test_training_has_every_metric(client: TestClient, runs: Path) -> None:
    curves = dict(get(client, f"{API}/training")["curves"])
    steps = read_metrics(RunDir.open(runs / "small")).steps
    assert set(steps[STEPS - 1]) - {"step", "version", "time"} <= set(curves)
    assert [x for x, _ in curves["reward/mean"]] == list(range(1, STEPS + 1))
    assert curves["reward/mean"][-1][1] == pytest.approx(steps[STEPS - 1]["reward/mean"], rel=1e-5)
    assert len(curves["eval/held_out/accuracy"]) >= 1


def test_a_long_run_has_no_more_points_than_pixels(client: TestClient, runs: Path) -> None:
    with (runs / "small" / "metrics.jsonl").open("a") as file:
        for step in range(STEPS, 3000):
            file.write(json.dumps({"step": step, "version": step + 1, "reward/mean": float(step)}) + "\n")
        file.write('{"step": 3000, "version": 3001, "reward/mean": 1.0, "loss": NaN}\n')
    for _, points in get(client, f"{API}/training", width=100)["curves"]:
        assert len(points) <= 100
    assert len(get(client, f"{API}/overview")["curves"]["reward"]) <= 240
    (alarm, *_) = get(client, f"{API}/overview")["advisories"]
    assert (alarm["level"], alarm["title"]) == ("alarm", "not a number")


# -- trajectories ---------------------------------------------------------------------------------------------------


def all_rows(client: TestClient, **filters: Any) -> list[dict[str, Any]]:
    data = get(client, f"{API}/trajectories", **filters)
    assert data["total"] == len(data["rows"]) <= data["size"]
    rows: list[dict[str, Any]] = data["rows"]
    return rows


def test_trajectories_are_filtered_by_the_server(client: TestClient) -> None:
    rows = all_rows(client)
    assert {row["state"] for row in rows} <= {"trained", "failed", "generating", "scoring", "waiting"}
    trained = all_rows(client, state="trained")
    assert trained == [row for row in rows if row["state"] == "trained"] != []
    assert all_rows(client, version=0) == [row for row in rows if row["version"] == 0] != []
    assert all_rows(client, group=rows[0]["group"]) == [row for row in rows if row["group"] == rows[0]["group"]]
    scored = [row for row in rows if row["reward"] is not None]
    middle = sorted(row["reward"] for row in scored)[len(scored) // 2]
    assert all_rows(client, least_reward=middle) == [row for row in scored if row["reward"] >= middle]
    assert all_rows(client, most_tokens=3) == [row for row in rows if row["tokens"] is not None and row["tokens"] <= 3]
    best = [row["reward"] for row in all_rows(client, order="reward", least_reward=-9)]
    assert best == sorted(best, reverse=True)
    failed = all_rows(client, state="failed")
    assert failed == [row for row in rows if row["state"] == "failed"]


def test_texts_are_searched(client: TestClient, runs: Path) -> None:
    path = runs / "small" / "samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))  # not every group is recorded
    samples = list(lines(path))
    assert len(samples) < len(all_rows(client))
    wanted = {one["trajectory"] for one in samples if "three" in one["prompt"] + one["response"]}
    assert {row["id"] for row in all_rows(client, text="THREE")} == wanted != set()
    assert {row["id"] for row in all_rows(client, recorded=1)} == {one["trajectory"] for one in samples}
    assert all_rows(client, text="no response contains this") == []


@pytest.mark.parametrize("text", ["' OR 1=1 --", '"', "%", ");DROP TABLE groups;--", "\u0000"])
def test_filters_are_never_part_of_a_query(client: TestClient, text: str) -> None:
    assert all_rows(client, state=text) == []
    assert client.get(f"{API}/trajectories", params={"version": text}).status_code == 422
    assert client.get(f"{API}/trajectories", params={"order": text}).status_code == 422
    assert len(all_rows(client)) > 0


def test_hostile_text_arrives_as_data(client: TestClient, runs: Path) -> None:
    """The text of a response comes as JSON that no browser takes for a page; scripts insert it as text."""
    with (runs / "small" / "samples.jsonl").open("a") as file:
        hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
        sample = next(lines(runs / "small" / "samples.jsonl"))
        file.write(json.dumps({**sample, "response": hostile}) + "\n")
    answer = client.get(f"{API}/trajectories/{sample['trajectory']}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["sample"]["response"] == hostile


def test_one_trajectory_has_its_tokens_and_siblings(client: TestClient, runs: Path) -> None:
    with sqlite3.connect(runs / "small" / "ledger.db") as ledger:
        kept = [row[0] for row in ledger.execute("SELECT DISTINCT trajectory FROM tokens WHERE sampled = 1")]
    assert kept, "the ledger has the tokens of the last groups"
    one = get(client, f"{API}/trajectories/{kept[-1]}")
    tokens = [token for turn in one["turns"] for token in turn["tokens"]]
    assert all(logprob <= 0 for _, logprob in tokens)
    words = " ".join(text.strip() for text, _ in tokens).split()
    assert set(words) <= {"<end>", "one", "two", "three", "</script>", "<script>alert(1)", "<!--", "[bold]"}
    assert len(one["siblings"]) == 2
    assert client.get(f"{API}/trajectories/999999").status_code == 422


def test_a_tokenizer_outside_the_run_is_not_read(runs: Path) -> None:
    with sqlite3.connect(runs / "small" / "ledger.db") as ledger:
        (number,) = ledger.execute("SELECT max(trajectory) FROM tokens WHERE sampled = 1").fetchone()
    for path in (runs / "small" / "checkpoints").glob("*/policy/tokenizer.json"):
        shutil.copy(path, runs.parent / "outside.json")
        path.unlink()
        path.symlink_to(runs.parent / "outside.json")
    one = get(client_of(runs), f"{API}/trajectories/{number}")
    assert all(text[0] == "\u2329" for turn in one["turns"] for text, _ in turn["tokens"])


# -- system -----------------------------------------------------------------------------------------------------------


def test_the_system_view_has_instances_and_what_differs_from_defaults(client: TestClient) -> None:
    data = get(client, f"{API}/system")
    names = {one["name"].partition(".")[0] for one in data["instances"]}
    assert {"i0", "i1"} <= names
    assert sum(one["responses"] for one in data["instances"]) > 0
    differing = {one["name"]: one for one in data["settings"] if one["differs"]}
    assert differing["control.max_staleness"]["value"] == 2
    assert differing["evaluation.data.source"]["value"] == "held_out.jsonl"
    assert differing["rollout.engine.max_context"]["default"] == 4096
    same = {one["name"] for one in data["settings"]} - set(differing)
    assert {"rollout.instances", "trainer.lora", "evaluation.data.seed", "trainer.optimiser.betas", "seed"} <= same


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "..", "", "linked.log", "none.log"])
def test_only_logs_of_the_run_are_shown(client: TestClient, runs: Path, name: str) -> None:
    (runs.parent / "secret.log").write_text("secret")
    (runs / "small" / "logs" / "linked.log").symlink_to(runs.parent / "secret.log")
    assert client.get(f"{API}/log", params={"name": name}).status_code == 422
    assert "linked.log" not in get(client, f"{API}/system")["logs"]
    assert "started" in get(client, f"{API}/log", name="supervisor.log")["text"]


def test_of_a_long_log_the_end_is_shown(client: TestClient, runs: Path) -> None:
    (runs / "small" / "logs" / "i0.log").write_text("".join(f"line {number}\n" for number in range(50_000)))
    text = get(client, f"{API}/log", name="i0.log")["text"]
    assert text.endswith("line 49999\n")
    assert text.startswith("line ")
    assert len(text) <= 48_000
