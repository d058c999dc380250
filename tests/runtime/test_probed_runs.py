"""Whole runs with the behaviour probe: every load is compared; a slot that differs ends the run, which can go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.apps.audit import audited
from dora_rl.core import events as e
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings


@pytest.mark.parametrize("mode", ["dora", "partial"])
def test_every_load_of_a_run_is_compared_with_the_trainer(host: Host, base: Path, mode: str) -> None:
    folder = make_run(base, f"probed-{mode}", settings(base, mode, steps=3))
    run = host.start(folder)
    assert broken(run, run.wait(), 3) == []
    found = audited(folder)
    assert found.problems == []
    published = [one.event for one in found.log if isinstance(one.event, e.Published)]
    loads = [one.event for one in found.log if isinstance(one.event, e.SlotLoaded)]
    assert published
    assert loads
    assert all(event.probe for event in published)
    assert all(event.probe is not None and event.probe.difference < 1e-4 for event in loads)
    figures = {figure.name.strip(): figure.value for figure in found.figures}
    assert figures["compared with the trainer's probe"].startswith(f"{len(loads)}, differing by at most ")


def test_a_slot_that_differs_ends_the_run_which_can_be_resumed(host: Host, base: Path) -> None:
    """No two kernels give the same last bits, so a tolerance below them is never met."""
    strict = {"rollout": {"engine": {"probe_tolerance": 1e-12}}}
    folder = make_run(base, "differs", merged(settings(base, steps=2), strict))
    outcome = host.start(folder).wait()
    assert outcome["code"] == 1
    assert "does not compute what the trainer published as version 0" in outcome["error"]
    assert "1e-12 is allowed in float32" in outcome["error"]
    assert "in 3 loads in a row" in outcome["error"]
    found = audited(folder)
    assert found.problems == []
    failed = [one.event for one in found.log if isinstance(one.event, e.SlotLoadFailed)]
    assert failed
    assert all(event.differs for event in failed)
    assert not any(isinstance(one.event, e.Generated) for one in found.log), "nothing was served"
    run = host.start(folder, settings=["rollout.engine.probe_tolerance=0.001"])
    assert broken(run, run.wait(), 2) == []
