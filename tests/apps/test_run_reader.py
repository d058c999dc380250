"""Reading and summarising recorded lines, without a run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_rl.apps import run_reader
from dora_rl.apps.evaluate import Response, interval, summary
from dora_rl.apps.init import EXAMPLES, document
from dora_rl.apps.panel import sparks
from dora_rl.apps.report import percentile, run_timeline
from dora_rl.apps.summary import occupancy_between, totals, worker_id
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.config import build, override
from dora_rl.core.time_accounting import occupancy
from dora_rl.core.types import SlotId
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def window(who: str, start: int, *shares: tuple[str, int | None, str, int]) -> run_reader.Window:
    return run_reader.Window(who, start, start + sum(share[3] for share in shares), list(shares))


# -- reading ----------------------------------------------------------------------------------------------------


def test_a_line_that_a_crash_cut_short_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"step": 0}, '{"step": 1, "rew{"step": 1}', {"step": 2}, '{"st')
    assert [line["step"] for line in run_reader.lines(tmp_path / "a.jsonl")] == [0, 2]


def test_a_step_that_was_trained_again_counts_once(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    write(folder.metrics, {"step": 0, "reward/mean": 1}, {"step": 1, "reward/mean": 2}, {"step": 1, "reward/mean": 3})
    assert [one["reward/mean"] for one in run_reader.read_metrics(folder).steps.values()] == [1, 3]


def test_ledger_time_is_summed_over_all_supervisor_processes(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    seconds = [0.5, 1.0, 0.25, 0.5]  # a resumed run counts from zero again
    write(folder.metrics, *({"step": step, "timing_s/ledger": spent} for step, spent in enumerate(seconds)))
    assert run_reader.read_metrics(folder).ledger_seconds == 1.5


def test_a_lost_process_is_a_note_and_not_a_window(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    write(folder.activity, {"note": "lost", "at": 5, "who": "i0.1", "reason": "killed"})
    windows, notes = run_reader.read_activity(folder)
    assert (len(windows), len(notes)) == (0, 1)


def test_a_model_folder_is_not_a_run(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "llama"})
    assert not run_reader.is_run(tmp_path)
    assert not run_reader.is_run(tmp_path / "none")


# -- time -------------------------------------------------------------------------------------------------------


def test_occupancy_is_the_share_of_available_slot_time_spent_on_work() -> None:
    slots, trainer = totals(
        [
            window("i0.1/0", 0, ("idle", None, "starting", 50), ("decode", 1, "", 60), ("prefill", 1, "", 10)),
            window("i1.1/0", 0, ("load", 1, "", 10), ("idle", None, "trainer", 20)),
            window("i1.1/1", 0, ("idle", None, "spare slot", 30), ("idle", None, "finished", 10)),
            window("trainer", 0, ("train", 1, "", 100)),
        ]
    )
    assert occupancy(slots) == 0.7
    assert trainer == {"train": 100}


def test_occupancy_of_a_step_comes_from_the_windows_that_overlap_it() -> None:
    windows = [
        window("i0.1/0", 0, ("idle", None, "starting", 5), ("decode", 0, "", 5)),
        window("i0.1/0", 10, ("decode", 0, "", 10)),
        window("i0.1/0", 20, ("idle", None, "trainer", 5), ("decode", 1, "", 5)),
        window("i1.1/0", 10, ("idle", None, "trainer", 20)),
        window("trainer", 0, ("train", 0, "", 30)),
    ]
    assert occupancy_between(windows, [0, 10, 12, 20, 30]) == pytest.approx([1, 0.5, 0.5, 0.25])
    assert occupancy_between(windows, []) == []
    assert occupancy_between([], [0, 10]) == [0]


def test_restarts_of_an_instance_share_a_row() -> None:
    assert (worker_id("i0.2/1"), worker_id("i0.2"), worker_id("trainer")) == ("i0/1", "i0", "trainer")
    windows = [
        window("i10.1/0", 0, ("decode", 0, "", 10)),
        window("i2.2/0", 30, ("decode", 1, "", 10)),
        window("i2.1/0", 0, ("decode", 0, "", 10)),
    ]
    moved = {"note": "moved", "at": 5, "source": "i2.1/0", "target": "i10.1/0", "count": 3}
    timeline = run_timeline(run_reader.ActivityLog(windows, [moved]), {0: 7})
    assert timeline is not None
    assert list(timeline.slots) == [SlotId("i2", 0), SlotId("i10", 0)]
    assert [(one.start, one.end) for one in timeline.slots[SlotId("i2", 0)]] == [(0, 10), (30, 40)]
    assert timeline.published == {1: 7}
    assert timeline.moves == [(5, SlotId("i2", 0), SlotId("i10", 0), 3)]


def test_a_window_is_drawn_in_a_likely_order_and_adds_up() -> None:
    shares = [("idle", None, "trainer", 5), ("decode", 3, "", 20), ("load", 4, "", 2), ("decode", 4, "", 30)]
    windows = [window("i0.1/0", 0, ("decode", 3, "", 9)), window("i0.1/0", 9, *reversed(shares))]
    timeline = run_timeline(run_reader.ActivityLog(windows, []), {})
    assert timeline is not None
    (segments,) = timeline.slots.values()
    assert [(one.activity.label, one.activity.version) for one in segments[1:]] == [
        (ActivityLabel.DECODE, 3),
        (ActivityLabel.IDLE, None),
        (ActivityLabel.LOAD, 4),
        (ActivityLabel.DECODE, 4),
    ]
    assert segments[-1].end == 9 + 57


def test_without_records_there_is_no_timeline() -> None:
    assert run_timeline(run_reader.ActivityLog([], []), {}) is None


# -- small helpers ----------------------------------------------------------------------------------------------


def test_percentiles_are_observed_lengths() -> None:
    assert [percentile(list(range(1, 101)), share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert percentile([7], 0.5) == 7


def test_sparks_are_scaled_from_the_lowest_to_the_highest() -> None:
    assert sparks([0.0, 0.5, 1.0]) == "▁▅█"  # a half is rounded up
    assert sparks([2.0]) == "▁"
    assert len(sparks([float(n) for n in range(1000)], width=24)) == 24


def test_the_interval_is_wilsons() -> None:
    assert interval([1.0] * 50 + [0.0] * 50, 1) == pytest.approx((0.404, 0.596), abs=1e-3)
    low, high = interval([0.0] * 20, 1)
    assert low == 0
    assert high == pytest.approx(0.161, abs=1e-3)


def test_identical_samples_do_not_narrow_the_interval() -> None:
    means = [1.0] * 30 + [0.0] * 20
    assert interval(means, 8) == interval(means, 1)
    assert interval([0.5] * 50, 8)[0] > interval([1.0, 0.0] * 25, 8)[0]


def test_a_response_without_a_reward_is_wrong_and_counted() -> None:
    responses = [Response(0, 10, 1.0), Response(0, 20, None), Response(1, 30, 0.25), Response(1, 40, 0.5)]
    result = summary(responses, success_threshold=0.5, samples=2)
    assert (result["accuracy"], result["avg@2"], result["pass@2"]) == (0.5, 0.5, 1.0)
    assert (result["failed"], result["mean_tokens"], result["reward"]) == (1, 25, 0.4375)


# -- init -------------------------------------------------------------------------------------------------------


def test_the_written_config_is_the_defaults_with_the_examples() -> None:
    written = tomllib.loads(document(RunConfig, EXAMPLES))
    off = "evaluation.data."  # a section that is commented out, its example with it
    given = {key: value for key, value in EXAMPLES.items() if not key.startswith(off)}
    plain = override({}, [f"{key}={json.dumps(value)}" for key, value in given.items()])
    assert build(RunConfig, written) == build(RunConfig, plain)


def test_the_written_config_has_every_setting_with_its_default() -> None:
    text = document(RunConfig, EXAMPLES)
    # A line that starts with a bare `#` is a setting, or notes that it has no default.
    everything = "\n".join(
        line.removeprefix("#") for line in text.splitlines() if not line.startswith("# ") and "is not set" not in line
    )
    uncommented = build(RunConfig, tomllib.loads(everything)).model_dump()
    written = build(RunConfig, tomllib.loads(text)).model_dump()
    assert uncommented["trainer"].pop("lora") == {"rank": 16, "alpha": 32, "targets": "all-linear"}
    assert written["trainer"].pop("lora") is None
    assert uncommented["evaluation"].pop("data")["source"] == "held_out.jsonl"
    assert written["evaluation"].pop("data") is None
    assert uncommented == written
    assert _leaves(RunConfig.model_json_schema()) <= {line.lstrip("#").split(" ")[0] for line in text.splitlines()}


def _leaves(schema: dict[str, Any]) -> set[str]:
    """Names of all settings of all sections."""
    sections = [schema, *schema["$defs"].values()]
    names = {(name, str(field)) for section in sections for name, field in section.get("properties", {}).items()}
    return {name for name, field in names if "$ref" not in field}
