"""Nothing about a run changes unseen: settings, the files that it reads, and the policy that it gives."""

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
    """A copy of a finished run, to be tampered with."""
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def edit(folder: RunDir, *path: str, value: Any) -> None:
    """Change a setting behind the run's back."""
    document = json.loads(folder.config.read_text())
    node = document["config"]
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    folder.config.write_text(json.dumps(document))


def figures(folder: RunDir) -> dict[str, str]:
    return {figure.name.strip(): figure.value for figure in audited(folder).figures}


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("trainer", "optimiser", "learning_rate"), 0.1, "'trainer.optimiser.learning_rate' is 0.1 and was 0.001"),
        (("reward", "functions"), ["exact"], '\'reward.functions\' is ["exact"] and was ["task.py:reward"]'),
        (("control", "max_staleness"), 2, "'control.max_staleness' is 2 and was 3"),
        (("seed",), 2, "'seed' is 2 and was 1"),
    ],
)
def test_an_edited_config_is_refused_and_named_by_the_audit(
    host: Host, copy: RunDir, path: tuple[str, ...], value: Any, said: str
) -> None:
    before = copy.config.read_text()
    edit(copy, *path, value=value)
    outcome = host.start(copy).wait()
    assert outcome["code"] == 2
    assert said in outcome["error"]
    assert [problem for problem in audited(copy).problems if said in problem]
    copy.config.write_text(before)
    assert host.start(copy).wait()["code"] == 0
    assert audited(copy).problems == []


def test_an_edited_base_folder_is_refused(host: Host, copy: RunDir, tmp_path: Path) -> None:
    document = json.loads(copy.config.read_text())
    shutil.copytree(document["base"], tmp_path / "other", ignore=shutil.ignore_patterns("runs"))
    copy.config.write_text(json.dumps(document | {"base": str(tmp_path / "other")}))
    outcome = host.start(copy).wait()
    assert outcome["code"] == 2
    assert "base directory" in outcome["error"]
    assert any("base directory" in problem for problem in audited(copy).problems)


def test_a_change_that_is_allowed_is_written_down(host: Host, copy: RunDir) -> None:
    outcome = host.start(copy, settings=["rollout.instances=3", "mismatch.warn=0.5"]).wait()
    assert outcome["code"] == 0
    assert "rollout.instances: 2 -> 3" in outcome["notices"]
    records = [one.record for one in audited(copy).records]
    found = {record.key: (record.before, record.after) for record in records if isinstance(record, SettingChanged)}
    assert found == {"rollout.instances": (2, 3), "mismatch.warn": (None, 0.5)}
    assert figures(copy)["rollout.instances changed"].startswith("2 -> 3, 20")
    assert audited(copy).problems == []
    again = host.start(copy).wait()
    assert again["notices"] == [], "it is compared with what it was changed to"


def test_the_ledger_has_the_config_from_the_start(finished: RunDir) -> None:
    first = audited(finished).records[0].record
    assert isinstance(first, Configured)
    assert first.config == finished.settings()
    assert figures(finished)["configuration, digest"] == first.digest[:16]


# -- files --------------------------------------------------------------------------------------------------------


class Task:
    """A run that has not begun, whose files can be changed."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = folder / "task"
        self.base.mkdir()
        shutil.copytree(base / "model", self.base / "model")
        self.write("reward.py", "import helper\n\ndef reward(prompts, completions, **_):\n    return helper.score()\n")
        self.write("helper.py", "def score():\n    return [1.0]\n")
        self.write("rows.jsonl", '{"prompt": "1=", "answer": "1"}\n')
        own = {"data": {"source": "rows.jsonl"}, "reward": {"functions": ["reward.py:reward", "exact"]}}
        tree = merged(settings(self.base), own)
        self.folder = make_run(self.base, "own", tree)

    def write(self, name: str, text: str) -> None:
        (self.base / name).write_text(text)

    def start(self) -> list[str]:
        """What is said when a supervisor begins with it."""
        said: list[str] = []
        ledger = Ledger(self.folder.ledger, 2)
        try:
            provenance = Provenance(self.folder, self.folder.read(), ledger, said.append)
            provenance.check()
            provenance.record(0)
        finally:
            ledger.close()
        return said


@pytest.fixture
def task(base: Path, tmp_path: Path) -> Task:
    return Task(base, tmp_path)


def test_all_files_that_a_run_reads_are_seen(task: Task) -> None:
    task.start()
    (seen,) = [one.record for one in audited(task.folder).records if isinstance(one.record, FilesSeen)]
    assert sorted(seen.code) == ["helper.py", "reward.py"], "a module that the reward imports belongs to it"
    assert sorted(seen.data) == ["rows.jsonl"]
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json"} <= seen.model.keys()


@pytest.mark.parametrize(("name", "said"), [("reward.py", "(code)"), ("helper.py", "(code)"), ("rows.jsonl", "(data)")])
def test_a_changed_file_is_said_once_and_written_down(task: Task, name: str, said: str) -> None:
    assert task.start() == []
    assert task.start() == []
    task.write(name, (task.base / name).read_text() + "\n")
    (warning,) = task.start()
    assert f"{name} {said} was changed" in warning
    assert task.start() == []
    assert f"{name} {said} was changed" in figures(task.folder)["a file that the run reads changed"]


def test_another_model_is_refused(task: Task) -> None:
    task.start()
    task.write("model/config.json", (task.base / "model" / "config.json").read_text() + "\n")
    with pytest.raises(UserError, match=r"model/config.json \(model\) was changed"):
        task.start()


# -- checkpoints --------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


TAMPERED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a changed policy": ("policy/model.safetensors", flip, "was changed"),
    "a truncated policy": ("policy/model.safetensors", cut, "was cut short"),
    "a policy without its tokenizer": ("policy/tokenizer.json", Path.unlink, "is missing"),
    "a changed state": ("state.json", flip, "was changed"),
    "a file too many": ("policy/chat_template.jinja", Path.touch, "was added"),
}


@pytest.mark.parametrize("name", TAMPERED)
@pytest.mark.parametrize("which", [0, -1])
def test_a_checkpoint_that_was_tampered_with_is_named(copy: RunDir, name: str, which: int) -> None:
    file, tamper, said = TAMPERED[name]
    checkpoint = checkpoint_names(copy.checkpoints)[which]
    tamper(copy.checkpoints / checkpoint / file)
    assert audited(copy).problems == [
        problem for problem in audited(copy).problems if problem.startswith(f"checkpoint {checkpoint}: {file} {said}")
    ]
    assert len(audited(copy).problems) == 1


def test_a_missing_checkpoint_is_named(copy: RunDir) -> None:
    for name in checkpoint_names(copy.checkpoints):
        shutil.move(copy.checkpoints / name, copy.path / name)
        assert audited(copy).problems == [f"checkpoint {name} is missing"]
        shutil.move(copy.path / name, copy.checkpoints / name)


def test_a_checkpoint_from_elsewhere_is_named(copy: RunDir) -> None:
    for name in ("version-00000002.7", "version-00000009.0"):
        shutil.copytree(copy.checkpoints / checkpoint_names(copy.checkpoints)[-1], copy.checkpoints / name)
        assert f"checkpoint {name} is not in the ledger" in audited(copy).problems
        shutil.rmtree(copy.checkpoints / name)


def forget_last_checkpoint(folder: RunDir) -> str:
    """As if the supervisor was killed between the checkpoint and the ledger's next write."""
    saved = [one for one in audited(folder).records if isinstance(one.record, CheckpointSaved)]
    connection = sqlite3.connect(folder.ledger)
    connection.execute("DELETE FROM records WHERE number >= ?", (saved[-1].number,))
    connection.commit()
    connection.close()
    assert isinstance(saved[-1].record, CheckpointSaved)
    return saved[-1].record.name


def test_a_checkpoint_that_the_ledger_missed_is_recorded_on_resume(host: Host, copy: RunDir) -> None:
    name = forget_last_checkpoint(copy)
    assert audited(copy).problems == [], "it vouches for itself"
    assert host.start(copy).wait()["code"] == 0
    last = audited(copy).records[-1].record
    assert isinstance(last, CheckpointSaved)
    assert last.name == name
    assert audited(copy).problems == []


def test_a_checkpoint_whose_trainer_is_lost_before_it_reports_is_recorded_by_the_next(host: Host, base: Path) -> None:
    wire = {"seed": 0, "faults": 1, "rate": 1.0, "kinds": ["unreported"]}
    tree = merged(settings(base, steps=4), {"checkpoint": {"keep": 10}})  # it is still there in the end
    run = host.start(make_run(base, "unreported", tree), wire=wire)
    assert broken(run, run.wait(), 4) == []
    assert fault_happened(run, "unreported")
    saved = [one.record.name for one in audited(run.folder).records if isinstance(one.record, CheckpointSaved)]
    assert len(saved) == len(set(saved)), "one that is known was recorded again, so that it vouches for itself"


def test_a_checkpoint_that_the_ledger_missed_is_checked_too(copy: RunDir) -> None:
    name = forget_last_checkpoint(copy)
    flip(copy.checkpoints / name / "policy" / "model.safetensors")
    assert audited(copy).problems == [f"checkpoint {name}: policy/model.safetensors was changed"]


# -- one of each --------------------------------------------------------------------------------------------------


def test_a_trainer_waits_until_no_other_is_left(host: Host, base: Path) -> None:
    """The lock of a former trainer is held by this process; who waits for it is what the kernel says."""
    folder = make_run(base, "two-trainers", settings(base, steps=1))
    with folder.trainer_lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = host.start(folder)
        while not waits_for_lock(run.pids().get("trainer")):
            assert run.alive()
            assert not checkpoint_names(folder.checkpoints), "it has begun beside the other"
        assert not checkpoint_names(folder.checkpoints)
    assert broken(run, run.wait(), 1) == []


def waits_for_lock(pid: int | None) -> bool:
    return any(line.split()[1:3] == ["->", "FLOCK"] and line.split()[5] == str(pid) for line in locks())


def locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()
