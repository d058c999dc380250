"""Trackers receive metrics and tables of completions: through the real packages where they are installed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.errors import ConfigError
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.trackers import table, trackers
from dora_rl.runtime.transport import messages as m
from tests.runtime.making import lines, make_base, make_run, settings
from tests.settings.workers import at, supervisor

SAMPLES: list[dict[str, Any]] = [
    {
        "step": 3,
        "version": 2,
        "versions": [2],
        "staleness": 1,
        "group": 7,
        "trajectory": number,
        "prompt": "1+1=",
        "response": f"answer {number}",
        "tokens": 2,
        "stop": "stop",
        "reward": 0.5 * number,
        "reward_components": {"correct": 1.0, **({"short": 0.5} if number else {})},
    }
    for number in range(2)
]
ONE = {"control": {"groups_per_step": 2, "group_size": 2, "steps": 4}, "rollout": {"instances": 1}}


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.completions: list[tuple[int, list[dict[str, Any]]]] = []

    def log(self, figures: dict[str, float], step: int) -> None:
        pass

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        self.completions.append((step, list(samples)))

    def close(self) -> None:
        pass


class Plain:
    """A tracker without tables."""

    def log(self, figures: dict[str, float], step: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("trackers"))


def run_dir(base: Path, name: str, **logging: Any) -> RunDir:
    return make_run(base, name, settings(base) | {"logging": {"tensorboard": False, **logging}})


def test_a_table_has_a_column_for_each_component_of_the_reward() -> None:
    columns, rows = table(SAMPLES)
    assert columns[-3:] == ["reward", "reward/correct", "reward/short"]
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [one["response"] for one in found] == ["answer 0", "answer 1"]
    assert [one["staleness"] for one in found] == [1, 1]
    assert [one["reward/short"] for one in found] == [None, 0.5]


@pytest.mark.parametrize(("every", "sent"), [(0, []), (1, [1]), (2, [1]), (3, [1])])
def test_completions_are_sent_every_so_many_steps(base: Path, every: int, sent: list[int]) -> None:
    """`logging.completions_every`: step 0 is a multiple of all, and 0 sends none."""
    with supervisor(base, ONE, at("logging.completions_every", every)) as harness:
        kept = Kept()
        harness.run.metrics._trackers += [Plain(), kept]
        harness.begin(max_requests=8, kv_tokens=10_000)
        for submit in harness.submits()[:2]:
            harness.finish(submit)
        harness.receive("trainer", m.StepMetrics(step=0, metrics={}))
        harness.run.metrics.flush()
        assert [version for version, _ in kept.completions] == sent
        assert all(samples == lines(harness.folder.samples) for _, samples in kept.completions)
        assert all(one["staleness"] == 0 for _, samples in kept.completions for one in samples)


def test_only_every_so_many_steps_have_a_table(base: Path) -> None:
    from dora_rl.envs.data import Problem
    from dora_rl.runtime.supervisor.metrics import MetricsRecorder
    from dora_rl.runtime.supervisor.trajectory_store import GroupEntry, TrajectoryEntry

    kept = Kept()
    folder = run_dir(base, "steps")
    recorder = MetricsRecorder(folder, [kept], 0, decode=str, samples=1, completions_every=2)
    for step in range(5):
        group = GroupEntry(
            Problem(key="0-a", prompt="p", answer="a", columns={}), (1,), "0-a", 0, {0: TrajectoryEntry()}
        )
        recorder.step_trained(step, {}, {step: group})
    recorder.close()
    assert [version for version, _ in kept.completions] == [1, 3, 5]
    assert [samples[0]["staleness"] for _, samples in kept.completions] == [0, 2, 4]
    assert len(lines(folder.samples)) == 5


def test_mlflow_has_the_run(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`logging.mlflow`: in a store of files; a run that is resumed is one run there."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = run_dir(base, "mlflow", mlflow="mine")
    for step in (3, 4):
        (tracker,) = trackers(folder, folder.read())
        tracker.log({"reward/mean": step / 10, "timing_s/step": 1.5}, step)
        tracker.log_completions(SAMPLES, step)  # type: ignore[attr-defined]
        tracker.close()
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_name == "mlflow"
    assert run.info.status == "FINISHED"
    assert run.data.params["control.max_staleness"] == "3"
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "reward/mean")] == [
        (3, 0.3),
        (4, 0.4),
    ]
    names = {one.path for one in client.list_artifacts(run.info.run_id, "completions")}
    assert names == {"completions/version-00000003.json", "completions/version-00000004.json"}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[-1] == {"path": max(names), "type": "table"}
    stored = json.loads(Path(client.download_artifacts(run.info.run_id, min(names), str(tmp_path))).read_text())
    assert stored["columns"][-2:] == ["reward/correct", "reward/short"]
    assert stored["data"][1][stored["columns"].index("response")] == "answer 1"


def test_a_store_that_mlflow_refuses_is_a_mistake_in_the_config(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://nowhere")
    folder = run_dir(base, "refused", mlflow="mine")
    with pytest.raises(ConfigError, match=r"'logging.mlflow': .*; set MLFLOW_TRACKING_URI to a server or database"):
        trackers(folder, folder.read())


def test_trackio_has_a_table_and_traces(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    folder = run_dir(base, "trackio", trackio="mine")
    (tracker,) = trackers(folder, folder.read())
    tracker.log({"reward/mean": 0.5}, 4)
    tracker.log_completions(SAMPLES, 4)  # type: ignore[attr-defined]
    tracker.close()
    stored: dict[str, str] = {}
    for path in tmp_path.rglob("*.db"):
        connection = sqlite3.connect(path)
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        stored |= {name: str(connection.execute(f"SELECT * FROM {name}").fetchall()) for (name,) in names}
        connection.close()
    assert "trackio.table" in stored["metrics"]
    assert all(f"answer {number}" in stored["traces"] for number in range(len(SAMPLES)))


def test_wandb_has_a_table(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    folder = run_dir(base, "wandb", wandb="mine")
    (tracker,) = trackers(folder, folder.read())
    tracker.log({"reward/mean": 0.5}, 4)
    tracker.log_completions(SAMPLES, 4)  # type: ignore[attr-defined]
    tracker.close()
    (file,) = tmp_path.rglob("*.table.json")
    stored = json.loads(file.read_text())
    assert stored["data"][1][stored["columns"].index("response")] == "answer 1"
