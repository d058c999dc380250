"""Changes to a run are detected: to its settings, to the files that it reads, and to its checkpoints."""

from __future__ import annotations

import fcntl
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_rl.apps.audit import audited
from dora_rl.core.errors import UserError
from dora_rl.ledger.ledger import Ledger
from dora_rl.ledger.run_records import CheckpointSaved, Configured, FilesSeen, SettingChanged
from dora_rl.runtime.checkpoint_manifest import checkpoint_names
from dora_rl.runtime.provenance import Provenance
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, fault_happened
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings


@pytest.fixture(scope="module")
def finished(host: Host, base: Path) -> RunDir:
    run = host.start(make_run(base, "provenance", settings(base, steps=3)))
    assert broken(run, run.wait(), 3) == []
    return run.folder


@pytest.fixture
def copy(finished: RunDir, tmp_path: Path) -> RunDir:
    """A copy of a finished run, which a test may tamper with."""
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def edit(folder: RunDir, *path: str, value: Any) -> None:
    """Change a setting directly in the configuration file of the run directory."""
    document = json.loads(folder.config.read_text())
    node = document["config"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    folder.config.write_text(json.dumps(document))


def figures(folder: RunDir) -> dict[str, str]:
    return {figure.name.strip(): figure.value for figure in audited(folder).figures}


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("trainer", "optimiser", "learning_rate"), 0.1, "'trainer.optimiser.learning_rate' is 0.1 and was 0.001"),
        (("reward", "functions"), ["exact"], '\'reward.functions\' is ["exact"] and was ["task.py:reward"]'),
        (("control", "max_staleness"), 2, "'control.max_staleness' is 2 and was 3"),
        (("seed",), 2, "'seed' is 2 and was 1"),
    ],
)
def test_an_edited_config_is_refused_and_reported_by_the_audit(
    host: Host, copy: RunDir, path: tuple[str, ...], value: Any, message: str
) -> None:
    before = copy.config.read_text()
    edit(copy, *path, value=value)
    outcome = host.start(copy).wait()
    assert outcome["code"] == 2
    assert message in outcome["error"]
    assert [problem for problem in audited(copy).problems if message in problem]
    copy.config.write_text(before)
    assert host.start(copy).wait()["code"] == 0
    assert audited(copy).problems == []


def test_an_edited_base_directory_is_refused(host: Host, copy: RunDir, tmp_path: Path) -> None:
    document = json.loads(copy.config.read_text())
    shutil.copytree(document["base"], tmp_path / "other", ignore=shutil.ignore_patterns("runs"))
    copy.config.write_text(json.dumps(document | {"base": str(tmp_path / "other")}))
    outcome = host.start(copy).wait()
    assert outcome["code"] == 2
    assert "base directory" in outcome["error"]
    assert any("base directory" in problem for problem in audited(copy).problems)


def test_an_allowed_change_of_a_setting_is_recorded(host: Host, copy: RunDir) -> None:
    outcome = host.start(copy, settings=["rollout.instances=3", "mismatch.warn=0.5"]).wait()
    assert outcome["code"] == 0
    assert "rollout.instances: 2 -> 3" in outcome["notices"]
    records = [one.record for one in audited(copy).records]
    found = {record.key: (record.before, record.after) for record in records if isinstance(record, SettingChanged)}
    assert found == {"rollout.instances": (2, 3), "mismatch.warn": (None, 0.5)}
    assert figures(copy)["rollout.instances changed"].startswith("2 -> 3, 20")
    assert audited(copy).problems == []
    again = host.start(copy).wait()
    assert again["notices"] == [], "the setting is compared with its changed value, not with the first one"


def test_the_first_record_of_the_ledger_is_the_config(finished: RunDir) -> None:
    first = audited(finished).records[0].record
    assert isinstance(first, Configured)
    assert first.config == finished.settings()
    assert figures(finished)["configuration, digest"] == first.digest[:16]


# -- files --------------------------------------------------------------------------------------------------------


class Task:
    """A run that has not started, whose code and data files a test can change."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = folder / "task"
        self.base.mkdir()
        shutil.copytree(base / "model", self.base / "model")
        self.write("reward.py", "import helper\n\ndef reward(prompts, completions, **_):\n    return helper.score()\n")
        self.write("helper.py", "def score():\n    return [1.0]\n")
        self.write("rows.jsonl", '{"prompt": "1=", "answer": "1"}\n')
        changes = {"data": {"source": "rows.jsonl"}, "reward": {"functions": ["reward.py:reward", "exact"]}}
        tree = merged(settings(self.base), changes)
        self.folder = make_run(self.base, "own", tree)

    def write(self, name: str, text: str) -> None:
        (self.base / name).write_text(text)

    def start(self) -> list[str]:
        """Check and record the files as a supervisor does when it starts, and return its notices."""
        notices: list[str] = []
        ledger = Ledger(self.folder.ledger, 2)
        try:
            provenance = Provenance(self.folder, self.folder.read(), ledger, notices.append)
            provenance.check()
            provenance.record(0)
        finally:
            ledger.close()
        return notices


@pytest.fixture
def task(base: Path, tmp_path: Path) -> Task:
    return Task(base, tmp_path)


def test_all_files_that_a_run_reads_are_recorded(task: Task) -> None:
    task.start()
    (seen,) = [one.record for one in audited(task.folder).records if isinstance(one.record, FilesSeen)]
    assert sorted(seen.code) == ["helper.py", "reward.py"], (
        "a module that the reward function imports is part of its code"
    )
    assert sorted(seen.data) == ["rows.jsonl"]
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= seen.model.keys()


@pytest.mark.parametrize(("name", "kind"), [("reward.py", "(code)"), ("helper.py", "(code)"), ("rows.jsonl", "(data)")])
def test_a_changed_file_is_reported_once_and_recorded(task: Task, name: str, kind: str) -> None:
    assert task.start() == []
    assert task.start() == []
    task.write(name, (task.base / name).read_text() + "\n")
    (warning,) = task.start()
    assert f"{name} {kind} was changed" in warning
    assert task.start() == []
    assert f"{name} {kind} was changed" in figures(task.folder)["a file that the run reads changed"]


def test_a_changed_model_is_refused(task: Task) -> None:
    task.start()
    task.write("model/config.json", (task.base / "model" / "config.json").read_text() + "\n")
    with pytest.raises(UserError, match=r"model/config.json \(model\) was changed"):
        task.start()


# -- checkpoints --------------------------------------------------------------------------------------------------


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


TAMPERED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a changed policy": ("policy/model.safetensors", flip_last_bit, "was changed"),
    "a truncated policy": ("policy/model.safetensors", truncate, "was cut short"),
    "a policy without its tokenizer": ("policy/tokenizer.json", Path.unlink, "is missing"),
    "a changed state": ("state.json", flip_last_bit, "was changed"),
    "an additional file": ("policy/chat_template.jinja", Path.touch, "was added"),
}


@pytest.mark.parametrize("name", TAMPERED)
@pytest.mark.parametrize("which", [0, -1])
def test_a_checkpoint_that_was_tampered_with_is_reported(copy: RunDir, name: str, which: int) -> None:
    file, tamper, message = TAMPERED[name]
    checkpoint = checkpoint_names(copy.checkpoints)[which]
    tamper(copy.checkpoints / checkpoint / file)
    assert audited(copy).problems == [
        problem
        for problem in audited(copy).problems
        if problem.startswith(f"checkpoint {checkpoint}: {file} {message}")
    ]
    assert len(audited(copy).problems) == 1


def test_a_missing_checkpoint_is_reported(copy: RunDir) -> None:
    for name in checkpoint_names(copy.checkpoints):
        shutil.move(copy.checkpoints / name, copy.path / name)
        assert audited(copy).problems == [f"checkpoint {name} is missing"]
        shutil.move(copy.path / name, copy.checkpoints / name)


def test_a_checkpoint_that_the_run_did_not_save_is_reported(copy: RunDir) -> None:
    for name in ("version-00000002.7", "version-00000009.0"):
        shutil.copytree(copy.checkpoints / checkpoint_names(copy.checkpoints)[-1], copy.checkpoints / name)
        assert f"checkpoint {name} is not in the ledger" in audited(copy).problems
        shutil.rmtree(copy.checkpoints / name)


def remove_record_of_last_checkpoint(folder: RunDir) -> str:
    """Leave the ledger as if the supervisor was killed after the checkpoint was saved and before that was recorded."""
    saved = [one for one in audited(folder).records if isinstance(one.record, CheckpointSaved)]
    connection = sqlite3.connect(folder.ledger)
    connection.execute("DELETE FROM records WHERE number >= ?", (saved[-1].number,))
    connection.commit()
    connection.close()
    assert isinstance(saved[-1].record, CheckpointSaved)
    return saved[-1].record.name


def test_an_unrecorded_checkpoint_is_recorded_on_resume(host: Host, copy: RunDir) -> None:
    name = remove_record_of_last_checkpoint(copy)
    assert audited(copy).problems == [], "the newest checkpoint is checked against its manifest"
    assert host.start(copy).wait()["code"] == 0
    last = audited(copy).records[-1].record
    assert isinstance(last, CheckpointSaved)
    assert last.name == name
    assert audited(copy).problems == []


def test_a_checkpoint_is_recorded_if_its_trainer_is_lost_before_reporting_it(host: Host, base: Path) -> None:
    wire = {"seed": 0, "faults": 1, "rate": 1.0, "kinds": ["unreported"]}
    tree = merged(
        settings(base, steps=4), {"checkpoint": {"keep": 10}}
    )  # so that the checkpoint still exists at the end
    run = host.start(make_run(base, "unreported", tree), wire=wire)
    assert broken(run, run.wait(), 4) == []
    assert fault_happened(run, "unreported")
    saved = [one.record.name for one in audited(run.folder).records if isinstance(one.record, CheckpointSaved)]
    assert len(saved) == len(set(saved)), (
        "a checkpoint was recorded twice, the second time with the digests of its manifest"
    )


def test_an_unrecorded_checkpoint_is_checked_by_the_audit(copy: RunDir) -> None:
    name = remove_record_of_last_checkpoint(copy)
    flip_last_bit(copy.checkpoints / name / "policy" / "model.safetensors")
    assert audited(copy).problems == [f"checkpoint {name}: policy/model.safetensors was changed"]


# -- only one trainer ------------------------------------------------------------------------------------------------


def test_a_trainer_waits_until_the_former_trainer_has_ended(host: Host, base: Path) -> None:
    """This process holds the lock in place of a former trainer; `/proc/locks` shows which process waits for it."""
    folder = make_run(base, "two-trainers", settings(base, steps=1))
    with folder.trainer_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = host.start(folder)
        while not waits_for_lock(run.pids().get("trainer")):
            assert run.alive()
            assert not checkpoint_names(folder.checkpoints), "the trainer started although the lock is held"
        assert not checkpoint_names(folder.checkpoints)
    assert broken(run, run.wait(), 1) == []


def waits_for_lock(pid: int | None) -> bool:
    return any(line.split()[1:3] == ["->", "FLOCK"] and line.split()[5] == str(pid) for line in locks())


def locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()
