"""The policy of the best version is kept, whatever becomes of its checkpoint; the others are not."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.apps import run_reader
from dora_rl.apps.audit import audited
from dora_rl.apps.summary import summarise
from dora_rl.runtime.checkpoint_manifest import best_version
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.best_policy import BestPolicy
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings

EVERY = 2


def is_due(version: int) -> bool:
    return version % EVERY == 0


def write_checkpoint(checkpoints: Path, version: int) -> str:
    name = f"version-{version:08d}.0"
    (checkpoints / name / "policy" / "inner").mkdir(parents=True)
    (checkpoints / name / "policy" / "model").write_text(f"weights of {version}")
    (checkpoints / name / "policy" / "inner" / "file").write_text("file")
    return name


def names(checkpoints: Path) -> set[str]:
    return {path.name for path in checkpoints.iterdir() if not path.name.startswith("version-")}


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), st.integers(0, 2), st.integers(0, 7))
def test_the_best_policy_is_kept_across_restarts_and_nothing_else(scores: list[float], late: int, restart: int) -> None:
    """Checkpoints are deleted before their version is evaluated, `late` evaluations later."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder)
        best, done = BestPolicy(checkpoints, is_due, {}), dict[int, float]()
        waiting = []
        for number, score in enumerate([*scores, *[None] * late]):
            if score is not None:
                for version in (EVERY * number, EVERY * number + 1):
                    name = write_checkpoint(checkpoints, version)
                    best.checkpoint_written(name)
                    shutil.rmtree(checkpoints / name)
                waiting.append((EVERY * number, score))
            if number >= late and waiting:
                version, accuracy = waiting.pop(0)
                done[version] = accuracy
                best.evaluated(version, accuracy)
            if number == restart:
                if (checkpoints / "best").is_symlink():  # as if the run directory had been copied
                    copied = (checkpoints / "best").resolve()
                    (checkpoints / "best").unlink()
                    shutil.copytree(copied, checkpoints / "best")
                best = BestPolicy(checkpoints, is_due, done)
        winner = EVERY * scores.index(max(scores))
        assert (checkpoints / "best" / "policy" / "model").read_text() == f"weights of {winner}"
        assert (checkpoints / "best" / "policy" / "inner" / "file").read_text() == "file"
        assert names(checkpoints) == {"best", f"best-{winner:08d}"}
        assert best_version(checkpoints) == winner


def test_what_a_killed_supervisor_left_is_removed_and_a_lost_checkpoint_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / ".staged-best-00000002" / "policy").mkdir(parents=True)
    (tmp_path / ".staged-best").symlink_to("nowhere")
    best = BestPolicy(tmp_path, is_due, {})
    best.checkpoint_written("version-00000002.0")  # deleted already
    best.evaluated(2, 1.0)
    assert names(tmp_path) == set()


def test_a_run_keeps_its_best_policy_and_the_audit_verifies_it(host: Host, base: Path) -> None:
    evaluated = {"evaluation": {"every": 1, "data": {"source": "task.py:problems", "params": {"count": 4}}}}
    tree = merged(settings(base, steps=4), evaluated | {"checkpoint": {"keep": 1}})
    run = host.start(make_run(base, "best", tree))
    assert broken(run, run.wait(), 4) == []
    summary = summarise(run.folder)
    assert summary.best is not None
    version, path = summary.best[0], run_reader.best_policy(run.folder)
    assert path is not None
    assert best_version(run.folder.checkpoints) == version
    assert run_reader.policies(run.folder).keys() == {version, 4}
    (path / "config.json").unlink()  # of the link only, if the checkpoint is still there
    (path / "config.json").write_text("{}")
    assert [one for one in audited(run.folder).problems if "checkpoint best" in one and "config.json" in one]


@pytest.mark.parametrize("there", [False, True])
def test_a_run_without_a_best_policy_has_none(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "checkpoints").mkdir()
    assert run_reader.best_policy(RunDir(tmp_path)) is None
