"""Several processes train together as one would, and are lost together."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, final_weights, wait_for_events
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings
from tests.runtime.test_recovery import batches

STEPS = 3


def alike(ours: RunDir, theirs: RunDir) -> bool:
    a, b = final_weights(ours), final_weights(theirs)
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=1e-5) for name in a)


def test_two_ranks_train_as_one(host: Host, base: Path) -> None:
    folders = []
    for ranks in (1, 2):
        tree = merged(settings(base, "sync", steps=STEPS), {"trainer": {"ranks": ranks}})
        run = host.start(make_run(base, f"ranks-{ranks}", tree))
        assert broken(run, run.wait(), STEPS) == []
        folders.append(run.folder)
    assert batches(folders[0]) == batches(folders[1])
    assert alike(*folders)


def test_a_rank_that_is_lost_takes_the_others_with_it(host: Host, base: Path) -> None:
    steps = 8
    run = host.start(make_run(base, "ranks-lost", merged(settings(base, steps=steps), {"trainer": {"ranks": 2}})))
    assert wait_for_events(run, 25)
    before = run.pids()
    assert run.signal(signal.SIGKILL, "rank1")
    outcome = run.wait()
    assert broken(run, outcome, steps) == []
    assert any("rank1.1" in notice for notice in outcome["notices"])
    assert run.pids()["trainer"] != before["trainer"]
