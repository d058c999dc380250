"""A run that chooses its staleness bound: the promises hold under all its bounds, also after an interruption."""

from __future__ import annotations

import signal
from pathlib import Path

from dora_rl.apps.audit import audited
from dora_rl.apps.summary import summarise
from dora_rl.apps.summary_table import rows
from dora_rl.core import events as e
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, wait_for
from tests.runtime.host import Host
from tests.runtime.making import lines, make_base, make_run, merged, settings

STEPS = 18
AUTO = {"control": {"max_staleness": "auto", "max_staleness_cap": 3, "steps": STEPS, "groups_per_step": 1}}


def changes(folder: RunDir) -> list[int]:
    """The bounds that were put in force, from the ledger."""
    return [logged.event.max_staleness for logged in audited(folder).log if isinstance(logged.event, e.BoundChanged)]


def in_force(folder: RunDir) -> dict[int, float]:
    """The bound in each step, from the metrics."""
    return {line["step"]: line["off_policy/bound"] for line in lines(folder.metrics) if "step" in line}


def test_a_run_raises_its_bound_while_the_trainer_waits_and_resumes_with_it(host: Host, tmp_path: Path) -> None:
    """Rewards are slow, so the trainer waits for most of each step until the file `hurry` exists."""
    base = make_base(tmp_path)
    tree = merged(merged(settings(base), AUTO), {"reward": {"functions": ["task.py:unhurried"]}})
    run = host.start(make_run(base, "auto", tree))
    assert wait_for(run, lambda: b"BoundChanged" in run.folder.events.read_bytes() if run.events() else False)
    assert run.signal(signal.SIGINT)
    run.wait()
    before, last = changes(run.folder), max(in_force(run.folder))
    assert before[0] == 2, "from 1 to 2"
    (base / "hurry").touch()

    refused = host.start(run.folder, settings=["control.max_staleness=2"]).wait()
    assert refused["code"] == 2
    assert "'control.max_staleness' can't change between \"auto\" and a number" in refused["error"]

    run = host.start(run.folder)
    assert broken(run, run.wait(), STEPS) == []
    bounds = in_force(run.folder)
    assert bounds[0] == 1.0
    assert bounds[last + 1] == before[-1], "the bound in force when it was interrupted"
    assert set(bounds.values()) <= {1.0, 2.0, 3.0}
    summary = summarise(run.folder)
    assert (summary.max_staleness, summary.auto_bound) == (3, bounds[STEPS - 1])
    assert dict(rows(summary))["mode"] == f"dora, staleness at most 3 (auto, now {bounds[STEPS - 1]:.0f})"
