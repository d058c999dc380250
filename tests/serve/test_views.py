"""The data of the views, on a small real run that was interrupted and resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dora_rl.apps.exports.prometheus import CONTENT_TYPE, prometheus_text
from dora_rl.apps.report import run_timeline
from dora_rl.apps.run_reader import Window, read_activity, read_facts
from dora_rl.apps.serve.lanes import Lane, Lanes
from dora_rl.apps.serve.tail import JsonlTail, line_at
from dora_rl.apps.summary import summarise, totals
from dora_rl.apps.timeline import CAUSE_COLOURS, drawn
from dora_rl.core.activities import IdleReason
from dora_rl.core.types import SECOND
from dora_rl.runtime.run_dir import RunDir
from tests.apps.conftest import STEPS
from tests.serve.conftest import client_of, get

if TYPE_CHECKING:
    from starlette.testclient import TestClient


def cells(runs: list[list[Any]]) -> list[list[Any]]:
    return [cell for count, *cell in runs for _ in range(count)]


# -- Prometheus -----------------------------------------------------------------------------------------------------


def test_a_prometheus_server_can_scrape_a_run(client: TestClient, runs: Path) -> None:
    answer = client.get("/metrics/small")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert answer.text == prometheus_text(RunDir.open(runs / "small"))
    assert client.get("/metrics/none").status_code == 404


# -- overview -----------------------------------------------------------------------------------------------------


def test_the_overview_has_the_values_of_the_summary(client: TestClient, runs: Path) -> None:
    data, summary = get(client, "/api/runs/small/overview"), summarise(RunDir.open(runs / "small"))
    assert data["steps"] == summary.steps == STEPS
    assert data["state"] == summary.state == "finished"
    assert data["tokens"] == summary.tokens
    assert data["staleness"]["mean"] == pytest.approx(summary.mean_staleness)
    assert dict(data["failed"]) == summary.failed
    assert data["left"] is None
    assert len(data["curves"]["reward"]) == STEPS
    for shares in (data["slots"], data["trainer"]):
        assert sum(share for _, share in shares) == pytest.approx(1)


def test_the_accuracy_has_an_interval(client: TestClient) -> None:
    low, high = get(client, "/api/runs/small/overview")["learning"]["accuracy_interval"]
    accuracy = get(client, "/api/runs")["runs"][0]["accuracy"]
    assert 0 <= low <= accuracy <= high <= 1
    assert high - low > 0.2, "six prompts say little"


def test_a_run_that_has_not_started_has_an_overview(client: TestClient, runs: Path) -> None:
    for name in ("metrics.jsonl", "activity.jsonl", "samples.jsonl", "ledger.db"):
        (runs / "small" / name).unlink()
    data = get(client, "/api/runs/small/overview")
    assert (data["steps"], data["binding"]["what"], data["learning"]["verdict"]) == (0, "unknown", "too early")
    assert get(client, "/api/runs/small/timeline")["rows"] == []


def test_a_damaged_run_is_reported_and_the_others_are_served(client: TestClient, runs: Path) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text('{"base": "/", "config": {}}')
    (runs / "small" / "ledger.db").write_bytes(b"not a ledger" * 1000)
    states = {run["id"]: run["state"] for run in get(client, "/api/runs")["runs"]}
    assert states == {"broken": "unreadable", "small": "unreadable"}
    for name in states:
        answer = client.get(f"/api/runs/{name}/overview")
        assert answer.status_code == 422
        assert answer.json()["error"]


# -- timeline -----------------------------------------------------------------------------------------------------


def test_the_timeline_is_that_of_the_report(client: TestClient, runs: Path) -> None:
    folder = RunDir.open(runs / "small")
    line = run_timeline(read_activity(folder), read_facts(folder).published)
    assert line is not None
    expected = drawn(line)
    ends = {"from": line.start / SECOND, "to": line.end / SECOND}
    data = get(client, "/api/runs/small/timeline", width=expected["columns"], **ends)
    assert data["columns"] == expected["columns"]
    assert [row["name"] for row in data["rows"]] == [row["name"] for row in expected["rows"]]
    assert {version for _, version in data["published"]} == {version for version, _ in expected["published"]}
    assert data["whole"][0] == pytest.approx(expected["begin"], abs=0.001)
    for row, other in zip(data["rows"], expected["rows"], strict=True):
        ours, theirs = cells(row["runs"]), cells(other["runs"])
        same = sum(a == b for a, b in zip(ours, theirs, strict=False))
        assert same > 0.95 * len(ours), "columns differ only where two activities are about equally long"


def test_causes_have_one_colour_everywhere(client: TestClient) -> None:
    sent = get(client, "/api/runs")["causes"]
    assert sent == {reason.value: CAUSE_COLOURS[reason] for reason in IdleReason}
    assert len(set(sent.values())) == len(sent)


def test_a_part_of_the_timeline_is_finer(client: TestClient) -> None:
    whole = get(client, "/api/runs/small/timeline", width=64)
    start, end = whole["whole"]
    middle = (start + end) / 2
    part = get(client, "/api/runs/small/timeline", width=64, **{"from": middle, "to": end})
    assert part["from"] == pytest.approx(middle)
    assert all(middle <= at <= end for at, _ in part["published"])
    fine = get(client, "/api/runs/small/timeline", width=128)
    ours, theirs = cells(part["trainer"]), cells(fine["trainer"])[64:]
    assert sum(a == b for a, b in zip(ours, theirs, strict=False)) >= 0.95 * len(theirs)


@pytest.mark.parametrize(
    "query", ["width=1e9", "width=-5", "from=9e9&to=1", "from=-1&to=-2", "first=-3", "first=999", "to=0", "width="]
)
def test_odd_requests_get_a_bounded_answer(client: TestClient, query: str) -> None:
    data = get(client, f"/api/runs/small/timeline?{query}")
    assert data["columns"] <= 4096
    assert all(sum(run[0] for run in row["runs"]) <= data["columns"] for row in data["rows"])


@pytest.mark.parametrize("query", ["width=abc", "from=nan", "to=inf"])
def test_a_parameter_that_is_no_number_is_refused(client: TestClient, query: str) -> None:
    assert client.get(f"/api/runs/small/timeline?{query}").status_code == 422


def fleet(slots: int, windows: int) -> Lanes:
    lanes = Lanes()
    for number in range(windows):
        for slot in range(slots):
            busy, start = 300 + slot % 7, number * 1000
            shares = [("decode", number // 10, "", busy), ("idle", None, "trainer", 1000 - busy)]
            lanes.add(Window(f"i{slot}.1/0", start, start + 1000, shares))
    return lanes


def test_above_64_lanes_the_shares_of_all_are_shown() -> None:
    lanes = fleet(200, 40)
    view = lanes.view(0, 40_000, 300, 128)
    assert (view["lanes"], len(view["rows"]), view["rows"][0]["name"]) == (200, 64, "i128/0")
    assert len(view["fleet"]["columns"]) == 300
    for column in view["fleet"]["columns"]:
        assert sum(part[0] for part in column) == pytest.approx(1, abs=0.01)
    assert lanes.view(0, 40_000, 300, 0)["fleet"] is not None
    assert fleet(64, 2).view(0, 2000, 300, 0)["fleet"] is None


def test_the_size_of_an_answer_does_not_grow_with_the_run() -> None:
    sizes = [len(json.dumps(fleet(70, windows).view(0, windows * 1000, 200, 0))) for windows in (200, 400)]
    assert sizes[1] < 1.3 * sizes[0]


def test_a_long_lane_stays_small_and_its_sums_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    import dora_rl.apps.serve.lanes as module

    monkeypatch.setattr(module, "_PER_LANE", 1000)
    lanes = fleet(1, 5000)
    lane = lanes.slots["i0/0"]
    assert len(lane.starts) <= 1000
    assert list(lane.starts) == sorted(lane.starts)
    assert all(end <= start for end, start in zip(lane.ends, lane.starts[1:], strict=False))
    assert lanes.slot_time == Counter({"decode": 5000 * 300, "idle: trainer": 5000 * 700})
    assert (lane.starts[0], lane.ends[-1]) == (0, 5_000_000)


def test_time_between_is_exact() -> None:
    lanes = fleet(3, 10)
    windows = [Window("i0.1/0", 0, 1000, [("decode", 0, "", 300), ("idle", None, "trainer", 700)])]
    slots, _ = totals(windows)
    first, second = lanes.slots_between([0, 1000, 2000])
    assert first["decode"] + first["idle: trainer"] == 3000
    assert first["decode"] == sum(300 + slot % 7 for slot in range(3))
    assert slots["decode"] == 300
    assert sum(second.values()) == 3000


def test_overlapping_windows_are_drawn_once() -> None:
    lane = Lane()
    for start, end in ((0, 10), (5, 20), (8, 12), (20, 30)):
        lane.append(start, end, start)
    assert list(zip(lane.starts, lane.ends, strict=True)) == [(0, 10), (10, 20), (20, 30)]


# -- growing files --------------------------------------------------------------------------------------------------


def test_a_growing_file_is_read_once_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = JsonlTail(path)
    assert list(tail.read()) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [record["a"] for _, record in tail.read()] == [1, 2]
    with path.open("a") as file:
        file.write(': 3}\nnot json\n{"a": 4}\n')
    later = list(tail.read())
    assert [record["a"] for _, record in later] == [3, 4]
    assert [line_at(path, offset) for offset, _ in later] == [{"a": 3}, {"a": 4}], "offsets are those of the lines"
    assert list(tail.read()) == []
    assert tail.resets == 0
    path.write_text('{"a": 9}\n')
    assert [record["a"] for _, record in tail.read()] == [9]
    assert tail.resets == 1


def test_what_is_added_to_a_run_appears(runs: Path) -> None:
    metrics = runs / "small" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-3]))
    client = client_of(runs)
    before = len(get(client, "/api/runs/small/overview")["curves"]["reward"])
    with metrics.open("a") as file:
        file.writelines(lines[-3:])
    after = len(get(client, "/api/runs/small/overview")["curves"]["reward"])
    assert before < after == STEPS
    metrics.write_text("".join(lines[:2]))  # a file that was replaced is read from its beginning
    assert len(get(client, "/api/runs/small/overview")["curves"]["reward"]) < before
