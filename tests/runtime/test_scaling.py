"""Instances join and leave while a run goes on; a run says how many it shall have."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dora_rl.apps.audit import audited
from dora_rl.core import events as e
from dora_rl.core.errors import UserError
from dora_rl.ledger.ledger import connect, read_events
from dora_rl.ledger.run_records import SettingChanged
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.scaling import scale
from tests.runtime.checks import broken, wait_for, wait_for_events
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings


def instances(folder: RunDir) -> tuple[set[str], set[str]]:
    """Places that joined, and instances that were lost."""
    connection = connect(folder.ledger)
    log = [logged.event for logged in read_events(connection)]
    connection.close()
    joined = {event.spec.instance for event in log if isinstance(event, e.InstanceJoined)}
    return joined, {event.instance for event in log if isinstance(event, e.InstanceLost)}


def test_instances_join_and_leave_in_mid_run(host: Host, base: Path) -> None:
    steps = 8
    waits = {"functions": ["task.py:waits_for_hurry"]}  # so that the run goes on until both changes have been made
    run = host.start(make_run(base, "scaled", merged(settings(base, steps=steps), {"reward": waits})))
    assert wait_for_events(run, 15)
    assert scale(run.folder, 4) == 2
    joined: set[str] = set()
    while run.alive() and len(joined) < 4:
        joined = {name.partition(".")[0] for name in instances(run.folder)[0]}
        time.sleep(0.05)
    assert joined == {"i0", "i1", "i2", "i3"}
    assert scale(run.folder, 1) == 4
    assert wait_for(run, lambda: len(instances(run.folder)[1]) == 3)
    (base / "hurry").touch()
    outcome = run.wait()
    assert broken(run, outcome, steps) == []
    assert {name.partition(".")[0] for name in instances(run.folder)[1]} == {"i1", "i2", "i3"}
    assert sum("leaves" in notice for notice in outcome["notices"]) == 3
    records = [one.record for one in audited(run.folder).records]
    changes = [(one.key, one.before, one.after) for one in records if isinstance(one, SettingChanged)]
    assert changes == [("rollout.instances", 2, 4), ("rollout.instances", 4, 1)]


def test_a_run_that_is_resumed_has_the_number_that_was_asked_for(host: Host, base: Path) -> None:
    folder = make_run(base, "scaled-later", settings(base, steps=2))
    scale(folder, 1)
    run = host.start(folder)
    assert broken(run, run.wait(), 2) == []
    assert instances(folder)[0] == {"i0.1"}


def test_what_can_not_be_scaled_says_why(base: Path) -> None:
    folder = make_run(base, "scaled-wrongly", settings(base))
    with pytest.raises(UserError, match="at least 1"):
        scale(folder, 0)
    tree = merged(settings(base), {"runtime": "ray", "ray": {"instances": "all"}})
    with pytest.raises(UserError, match="nodes"):
        scale(make_run(base, "scaled-all", tree), 3)
