"""A finished run that is resumed with more steps goes on as if it had been asked for them at the start."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from dora_rl.apps.audit import audited
from dora_rl.apps.summary import summarise
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.errors import UserError
from dora_rl.ledger.run_records import SettingChanged
from dora_rl.runtime.resume import change
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, final_weights
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings


@pytest.fixture(scope="module")
def two_steps(host: Host, base: Path) -> RunDir:
    run = host.start(make_run(base, "two-steps", settings(base, mode="sync", steps=2)))
    assert broken(run, run.wait(), 2) == []
    return run.folder


@pytest.fixture
def copy(two_steps: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(two_steps.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def trained(folder: RunDir) -> Counter[int]:
    """How often each group is named by the steps."""
    batches = {
        command.step: command.groups
        for entry in audited(folder).log
        for command in entry.commands
        if isinstance(command, c.Apply)
    }
    return Counter(group for groups in batches.values() for group in groups)


def test_an_extended_run_equals_a_longer_one(host: Host, base: Path, copy: RunDir) -> None:
    run = host.start(copy, settings=["control.steps=4"])
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    assert "control.steps: 2 -> 4" in outcome["notices"]
    assert trained(copy) == dict.fromkeys(range(8), 1)
    assert [one.event.steps for one in audited(copy).log if isinstance(one.event, e.StepsChanged)] == [4]
    changes = [one.record for one in audited(copy).records if isinstance(one.record, SettingChanged)]
    assert [(one.key, one.before, one.after) for one in changes] == [("control.steps", 2, 4)]
    summary = summarise(copy)
    assert (summary.steps, summary.steps_asked, summary.state) == (4, 4, "finished")

    longer = host.start(make_run(base, "four-steps", settings(base, mode="sync", steps=4)))
    assert broken(longer, longer.wait(), 4) == []
    theirs, ours = final_weights(longer.folder), final_weights(copy)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)

    again = host.start(copy).wait()
    assert (again["code"], again["notices"]) == (0, []), "nothing is left to do"


def test_a_change_that_was_interrupted_before_its_event_takes_effect_later(host: Host, copy: RunDir) -> None:
    """`config.json` is written first; the event follows from what the log lacks."""
    assert change(copy, ["control.steps=3"]) is None
    run = host.start(copy)
    assert broken(run, run.wait(), 3) == []


def test_fewer_steps_are_refused_in_one_sentence(host: Host, copy: RunDir) -> None:
    before = copy.config.read_text()
    with pytest.raises(UserError, match=r"asked for 2 steps and can't be asked for fewer \(1\)"):
        change(copy, ["control.steps=1"])
    assert copy.config.read_text() == before
    document = json.loads(before)
    document["config"]["control"]["steps"] = 1  # by hand
    copy.config.write_text(json.dumps(document))
    outcome = host.start(copy).wait()
    assert outcome["code"] == 2
    assert "can't be asked for fewer (1)" in outcome["error"]
    assert copy.read().control.steps == 2
    assert host.start(copy).wait()["code"] == 0


def test_a_run_whose_data_is_used_up_is_not_extended(host: Host, base: Path) -> None:
    tree = merged(settings(base, steps=9), {"data": {"params": {"count": 4}, "epochs": 1}})
    run = host.start(make_run(base, "used-up", tree))
    assert run.wait()["code"] == 0
    outcome = host.start(run.folder, settings=["control.steps=12"]).wait()
    assert outcome["code"] == 2
    assert "the data of the run is used up" in outcome["error"]
    assert run.folder.read().control.steps == 9
    assert audited(run.folder).problems == []


def test_a_finished_run_with_weights_in_memory_is_not_extended(host: Host, base: Path) -> None:
    run = host.start(make_run(base, "in-memory", settings(base, steps=1) | {"weights": "memory"}))
    assert broken(run, run.wait(), 1) == []
    outcome = host.start(run.folder, settings=["control.steps=2"]).wait()
    assert outcome["code"] == 2
    assert "its weights were in memory only" in outcome["error"]
    assert host.start(run.folder).wait()["code"] == 0
