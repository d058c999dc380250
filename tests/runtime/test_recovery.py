"""A run survives the loss of any process, the supervisor included: no data is lost or duplicated, nothing leaks."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.apps.audit import audited
from dora_rl.core import commands as c
from dora_rl.ledger.ledger import connect, read_events
from dora_rl.runtime.run_dir import RunDir
from dora_rl.trainer import checkpoint
from tests.runtime.checks import broken, fault_happened, final_weights, leftovers, strike, wait_for, wait_for_events
from tests.runtime.host import Host, Supervisor
from tests.runtime.making import PATIENCE, lines, make_run, merged, settings

STEPS = 5


def begin(host: Host, base: Path, name: str, other: dict[str, Any] | None = None, **faults: Any) -> Supervisor:
    tree = merged(settings(base, steps=STEPS), other or {})
    return host.start(make_run(base, name, tree), **faults)


def resume(host: Host, before: Supervisor, **faults: Any) -> Supervisor:
    return host.start(before.folder, **faults)


def finish(supervisor: Supervisor, steps: int = STEPS) -> dict[str, Any]:
    outcome = supervisor.wait()
    assert broken(supervisor, outcome, steps) == []
    return outcome


def test_killed_processes_are_replaced(host: Host, base: Path) -> None:
    run = begin(host, base, "kill", {"control": {"steps": 8}})
    dice = random.Random(0)
    struck = sum(strike(run, place, dice, most=25) for place in ("i0", "trainer", "reward0", "i1"))
    outcome = finish(run, 8)
    assert struck >= 2
    assert sum("is lost" in notice for notice in outcome["notices"]) >= struck, outcome


def test_killed_supervisor_is_resumed(host: Host, base: Path) -> None:
    run = begin(host, base, "kill-supervisor")
    dice = random.Random(3)
    for _ in range(2):
        assert strike(run, None, dice)
        assert "code" not in run.wait()
        run = resume(host, run)
    finish(run)


def test_killed_fork_server_is_replaced(host: Host, base: Path) -> None:
    run = begin(host, base, "kill-fork-server")
    assert strike(run, "fork_server", random.Random(1))
    finish(run)


# Deadlines that a running process meets. If one misses them on a busy machine, it is only restarted.
SHORT = {
    "control": {"deadlines": {"heartbeat": 3.0, "train": 10.0, "move": 3.0, "load": 15.0}},
    "supervision": {"restarts": 1000},
}


def test_stopped_processes_are_replaced(host: Host, base: Path) -> None:
    run = begin(host, base, "stop", SHORT)
    dice = random.Random(0)
    assert strike(run, "i1", dice, signal.SIGSTOP, most=25)
    assert strike(run, "trainer", dice, signal.SIGSTOP, most=10)
    finish(run)


def test_processes_that_do_not_start_are_replaced(host: Host, base: Path) -> None:
    run = begin(host, base, "stuck", SHORT)
    for place in ("i0", "i1"):
        assert wait_for(run, lambda place=place: place in run.pids())  # type: ignore[misc]
        assert run.signal(signal.SIGSTOP, place)
    outcome = finish(run)
    assert any("is lost" in notice for notice in outcome["notices"])


def test_stopped_evaluator_is_replaced(host: Host, base: Path) -> None:
    # An evaluator that makes no progress is given up after the deadlines for a load and a step.
    control = {"control": {"deadlines": {"train": PATIENCE}}, "data": {"held_out": 4}, "evaluation": {"every": 2}}
    run = begin(host, base, "evaluator", merged(SHORT, control))
    assert wait_for(run, lambda: "evaluator" in run.pids())
    assert run.signal(signal.SIGSTOP, "evaluator")
    finish(run)
    assert [line["evaluation"] for line in lines(run.folder.metrics) if "evaluation" in line][-3:] == [2, 4, 5]


def test_pending_evaluations_are_requested_again_after_a_restart(host: Host, base: Path) -> None:
    """The evaluator is stopped, so all four are still pending when the steps are done and the supervisor is killed."""
    run = begin(host, base, "evaluations", {"data": {"held_out": 4}, "evaluation": {"every": 2}})
    assert wait_for(run, lambda: "evaluator" in run.pids())
    assert run.signal(signal.SIGSTOP, "evaluator")
    assert wait_for(run, lambda: STEPS in checkpoint.versions(run.folder.checkpoints))
    assert run.signal(signal.SIGKILL)
    assert "code" not in run.wait()
    run = resume(host, run)
    finish(run)
    found = [one["evaluation"] for one in lines(run.folder.metrics) if "evaluation" in one]
    assert sorted(found) == [0, 2, 4, 5]


def test_stopped_supervisor_continues(host: Host, base: Path) -> None:
    run = begin(host, base, "stop-supervisor", SHORT)
    assert strike(run, None, random.Random(1), signal.SIGSTOP)
    time.sleep(3.5)  # longer than the heartbeat deadline
    run.signal(signal.SIGCONT)
    finish(run)


def test_metrics_of_a_step_are_kept_if_the_supervisor_dies_before_it_receives_the_version(
    host: Host, base: Path
) -> None:
    folder = make_run(base, "unpublished", settings(base, steps=3))
    wire = {"seed": 0, "faults": 0, "rate": 0.0, "kinds": ["unpublished"]}
    run = host.start(folder, wire=wire)
    assert wait_for(run, lambda: 1 in checkpoint.versions(folder.checkpoints))
    assert fault_happened(run, "unpublished")
    run.signal(signal.SIGKILL)
    run.wait()
    run = host.start(folder)
    assert broken(run, run.wait(), 3) == []
    assert [line["step"] for line in lines(folder.metrics) if "step" in line] == [0, 1, 2]


def test_interrupted_run_keeps_its_data(host: Host, base: Path) -> None:
    run = begin(host, base, "interrupt")
    assert strike(run, None, random.Random(5), signal.SIGINT)
    outcome = run.wait()
    assert outcome["code"] == 130
    assert leftovers(run, outcome) == []
    assert audited(run.folder).problems == []
    assert not audited(run.folder).finished
    finish(resume(host, run))


def test_second_interrupt_ends_the_run_at_once(host: Host, base: Path) -> None:
    run = begin(host, base, "interrupt-twice")
    assert strike(run, None, random.Random(6), signal.SIGINT)
    run.signal(signal.SIGINT)
    run.wait()
    finish(resume(host, run))


def test_resuming_a_finished_run_changes_nothing(host: Host, base: Path) -> None:
    run = begin(host, base, "finished", {"control": {"steps": 2}})
    finish(run, 2)
    before = run.folder.ledger.read_bytes(), run.events()
    again = resume(host, run)
    finish(again, 2)
    assert (run.folder.ledger.read_bytes(), run.events()) == before


def test_finished_run_without_its_last_checkpoint_writes_it(host: Host, base: Path) -> None:
    run = begin(host, base, "unsaved", {"control": {"steps": 2}, "checkpoint": {"every": 2}})
    finish(run, 2)
    last = checkpoint.latest(run.folder.checkpoints)
    assert last is not None
    weights = final_weights(run.folder)
    shutil.rmtree(last)
    again = resume(host, run)
    finish(again, 2)
    for name, tensor in final_weights(run.folder).items():
        torch.testing.assert_close(tensor, weights[name])


def test_second_supervisor_is_refused(host: Host, base: Path) -> None:
    run = begin(host, base, "two")
    assert wait_for_events(run, 10)
    pids = dict(run.pids())
    run.signal(signal.SIGSTOP, None)  # so that it still exists when the second one starts
    second = resume(host, run)
    assert not wait_for(second, lambda: False)
    refused = json.loads((run.folder.path / "outcome.json").read_text())
    run.signal(signal.SIGCONT, None)
    assert refused["code"] == 2
    assert "already running" in refused["error"]
    assert run.pids() == pids
    finish(run)


def test_hung_reward_fails_its_trajectory(host: Host, base: Path) -> None:
    (base / "hung").unlink(missing_ok=True)
    run = begin(host, base, "hung", {"reward": {"functions": ["task.py:hangs_once"], "timeout_seconds": 2.0}})
    finish(run)
    assert "took longer" in " ".join(failures(run.folder))


def test_reward_that_kills_its_process_is_retried(host: Host, base: Path) -> None:
    (base / "killed").unlink(missing_ok=True)
    run = begin(host, base, "killer", {"reward": {"functions": ["task.py:kills_once"]}})
    finish(run)
    assert failures(run.folder) == []


def failures(folder: RunDir) -> list[str]:
    """The reasons of the trajectories that failed."""
    connection = connect(folder.ledger)
    found = [row[0] for row in connection.execute("SELECT failed FROM trajectories WHERE failed IS NOT NULL")]
    connection.close()
    return found


def test_damaged_newest_checkpoint_is_set_aside(host: Host, base: Path) -> None:
    run = begin(host, base, "damaged-checkpoint")
    assert wait_for_version(run, 3)
    run.signal(signal.SIGKILL)
    run.wait()
    last = checkpoint.latest(run.folder.checkpoints)
    assert last is not None
    damage(max((last / "state").iterdir(), key=lambda path: path.stat().st_size))
    finish(resume(host, run))
    assert list(run.folder.checkpoints.glob("damaged-*"))


def wait_for_version(run: Supervisor, version: int) -> bool:
    return wait_for(run, lambda: version in checkpoint.versions(run.folder.checkpoints))


def damage(path: Path) -> None:
    """Flip some bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 16] = bytes(byte ^ 0x55 for byte in data[middle : middle + 16])
    path.write_bytes(data)


def test_run_waits_while_the_disk_is_full(host: Host, base: Path) -> None:
    full = base / "full"
    run = begin(host, base, "full", {"control": {"steps": 25}}, full=str(full))
    assert wait_for_events(run, 10)
    full.touch()
    assert wait_for(run, lambda: run.noticed("the run waits"))
    full.unlink()
    finish(run, 25)


def test_interrupt_while_the_disk_is_full_is_like_a_crash(host: Host, base: Path) -> None:
    full = base / "full-for-ever"
    run = begin(host, base, "full-for-ever", full=str(full))
    assert wait_for_events(run, 10)
    full.touch()
    assert wait_for(run, lambda: fault_happened(run, "full"))
    assert run.signal(signal.SIGINT)
    run.wait()
    assert audited(run.folder).problems == []
    finish(resume(host, run))


def test_power_loss(host: Host, base: Path) -> None:
    """Everything that was not synced to disk is lost: the ledger's last commits, and lines of the other files."""
    run = begin(host, base, "power")
    dice = random.Random(8)
    assert strike(run, None, dice)
    run.wait()
    folder = run.folder
    forget_unsynced(folder, dice)
    finish(resume(host, run))
    assert [line["step"] for line in lines(folder.metrics) if "step" in line] == sorted(
        {line["step"] for line in lines(folder.metrics) if "step" in line}
    )


def forget_unsynced(folder: RunDir, dice: random.Random) -> None:
    """Leave the files as after a power loss: a torn last frame in the WAL, unsynced files cut at a random length."""
    wal = folder.path / "ledger.db-wal"
    if wal.exists():
        with wal.open("ab") as file:
            file.write(dice.randbytes(3000))  # a commit that was being written
    for path in (folder.metrics, folder.samples, folder.activity, folder.events):
        if path.exists():
            os.truncate(path, dice.randint(0, path.stat().st_size))


def test_ledger_that_lost_synced_commits_is_refused(host: Host, base: Path) -> None:
    run = begin(host, base, "rolled-back")
    assert wait_for_version(run, 1)
    run.signal(signal.SIGSTOP)
    copy = run.folder.path / "copy"
    copy.mkdir()
    for path in run.folder.path.glob("ledger.db*"):
        shutil.copy(path, copy)
    run.signal(signal.SIGCONT)
    assert wait_for_version(run, 4)
    run.signal(signal.SIGKILL)
    run.wait()
    for path in run.folder.path.glob("ledger.db*"):
        path.rename(run.folder.path / f"true-{path.name}")
    for path in copy.iterdir():
        shutil.copy(path, run.folder.path)
    outcome = resume(host, run).wait()
    assert outcome["code"] == 1
    assert "put back a copy" in outcome["error"]
    for path in run.folder.path.glob("ledger.db*"):
        path.unlink()
    for path in run.folder.path.glob("true-*"):
        path.rename(run.folder.path / path.name.removeprefix("true-"))
    finish(resume(host, run))


def test_clock_jumps_are_survived(host: Host, base: Path) -> None:
    run = begin(host, base, "clock", jumps=[[0.5, -3600.0], [1.5, 7200.0]])
    finish(run)
    assert [line["at"] for line in lines(run.folder.events)] == sorted(line["at"] for line in lines(run.folder.events))


# -- reproducible results -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(host: Host, base: Path) -> RunDir:
    """A synchronous run without faults. It uses one thread, since more would sum in a different order."""
    run = begin(host, base, "whole", {"control": {"mode": "sync"}})
    finish(run)
    return run.folder


def same_weights(ours: RunDir, theirs: RunDir) -> bool:
    a, b = final_weights(ours), final_weights(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def batches(folder: RunDir) -> dict[int, list[str]]:
    """The prompts of each step, in order of admission."""
    connection = sqlite3.connect(folder.ledger)
    found: dict[int, list[str]] = {}
    for step, prompt in connection.execute("SELECT step, prompt FROM groups ORDER BY id"):
        found.setdefault(step, []).append(prompt)
    connection.close()
    return found


def test_weights_after_kill_and_resume_are_the_same(host: Host, base: Path, whole: RunDir) -> None:
    run = begin(host, base, "sync-killed", {"control": {"mode": "sync"}})
    dice = random.Random(11)
    for place in ("trainer", "i0", None):
        assert strike(run, place, dice, most=15)
    run.wait()
    run = resume(host, run)
    finish(run)
    assert batches(run.folder) == batches(whole)
    assert same_weights(run.folder, whole)


def test_no_staleness_is_synchronous_training(host: Host, base: Path, whole: RunDir) -> None:
    run = begin(host, base, "dora-0", {"control": {"mode": "dora", "max_staleness": 0}})
    finish(run)
    assert batches(run.folder) == batches(whole)
    assert same_weights(run.folder, whole)


def test_the_same_prompts_are_trained_after_a_crash(host: Host, base: Path) -> None:
    folders = []
    for name in ("prompts-whole", "prompts-killed"):
        run = begin(host, base, name)
        if name == "prompts-killed":
            assert strike(run, None, random.Random(2))
            run.wait()
            run = resume(host, run)
        finish(run)
        folders.append(run.folder)
    assert all(len(batch) == 2 for folder in folders for batch in batches(folder).values())
    ours, theirs = (Counter(prompt for batch in batches(folder).values() for prompt in batch) for folder in folders)
    assert ours == theirs


def test_a_step_is_applied_once_per_attempt(host: Host, base: Path) -> None:
    run = begin(host, base, "applied", {"checkpoint": {"every": 2}})
    dice = random.Random(4)
    strike(run, "trainer", dice)
    strike(run, "trainer", dice)
    finish(run)
    connection = connect(run.folder.ledger)
    applied = Counter(
        (command.step, command.attempt)
        for logged in read_events(connection)
        for command in logged.commands
        if isinstance(command, c.Apply)
    )
    connection.close()
    assert set(applied.values()) == {1}


# -- resuming with changed settings -------------------------------------------------------------------------------


def interrupted(host: Host, base: Path, name: str) -> Supervisor:
    run = begin(host, base, name, {"control": {"steps": 8}})
    assert strike(run, None, random.Random(name), signal.SIGINT)
    run.wait()
    return run


@pytest.mark.parametrize("count", [1, 3])
def test_resume_with_another_number_of_instances(host: Host, base: Path, count: int) -> None:
    run = interrupted(host, base, f"instances-{count}")
    before = run.pids()
    run = resume(host, run, settings=[f"rollout.instances={count}"])
    finish(run, 8)
    started = {place for place, pid in run.pids().items() if place.startswith("i") and before.get(place) != pid}
    assert started == {f"i{number}" for number in range(count)}
    assert run.folder.read().rollout.instances == count


@pytest.mark.parametrize("bound", [0, 6])
def test_resume_with_another_staleness_bound(host: Host, base: Path, bound: int) -> None:
    run = interrupted(host, base, f"bound-{bound}")
    admitted = len(audited(run.folder).log)
    run = resume(host, run, settings=[f"control.max_staleness={bound}"])
    finish(run, 8)
    connection = sqlite3.connect(run.folder.ledger)
    later = connection.execute(
        "SELECT max(step - version) FROM groups WHERE admitted_at > (SELECT at FROM events WHERE seq = ?)", (admitted,)
    ).fetchone()
    connection.close()
    assert (later[0] or 0) <= bound


def test_resume_with_other_changed_settings_is_refused(host: Host, base: Path) -> None:
    run = interrupted(host, base, "refused")
    outcome = resume(host, run, settings=["control.group_size=5"]).wait()
    assert outcome["code"] == 2
    assert "rollout.instances" in outcome["error"]
    finish(resume(host, run), 8)
