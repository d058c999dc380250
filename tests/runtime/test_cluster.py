"""The Ray runtime on a three-node cluster of this machine: the same promises, nodes that are lost and that join."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the Ray runtime needs the extra `ray`")

from dora_rl.core.errors import BundleError, StoreError
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.scaling import scale
from tests.chaos_ray import RayChaos
from tests.engine import tiny
from tests.engine.test_kv_transfer import COUNT, halfway, unmoved
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings
from tests.runtime.ray_runs import Nodes, RayRun, ray_settings
from tests.runtime.test_recovery import batches, same_weights

# Ray's own files and sockets are closed when the interpreter gets to it.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.close()


def names(folder: RunDir, kind: str) -> list[str]:
    """Instances that an event of this kind was about, in order."""
    found = []
    for line in folder.events.read_text().splitlines() if folder.events.exists() else []:
        with contextlib.suppress(ValueError):  # the last line may be half-written
            event = json.loads(line)["event"]
            if event["event"] == kind:
                found.append(event["spec"]["instance"] if "spec" in event else event["instance"])
    return found


def joined(folder: RunDir) -> list[str]:
    return names(folder, "InstanceJoined")


def until(seen: Any, seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_local_and_ray_give_the_same_trajectories_and_weights(nodes: Nodes, host: Host, base: Path) -> None:
    sync = {"mode": "sync"}
    local = host.start(make_run(base, "on-local", merged(settings(base, steps=3), {"control": sync})))
    remote = RayRun(make_run(base, "on-ray", merged(ray_settings(base, 3), {"control": sync})))
    local.wait()
    assert remote.broken(remote.wait(), 3) == []
    assert batches(remote.folder) == batches(local.folder)
    assert same_weights(remote.folder, local.folder)


def test_a_node_is_lost_and_another_joins_in_mid_run(nodes: Nodes, base: Path) -> None:
    steps = 80
    run = RayRun(make_run(base, "nodes", ray_settings(base, steps)))
    until(lambda: len(joined(run.folder)) == 2)
    assert run.wait_for_events(run.events() + 20)
    nodes.lose()
    until(lambda: names(run.folder, "InstanceLost"))
    before = run.events()
    assert run.wait_for_events(before + 10)  # it goes on with what is left
    nodes.add()
    until(lambda: len(joined(run.folder)) == 3)
    assert run.broken(run.wait(), steps) == []


def test_instances_follow_the_nodes_and_the_supervisor_can_be_killed(nodes: Nodes, base: Path) -> None:
    steps = 80
    nodes.restore()
    run = RayRun(make_run(base, "all", ray_settings(base, steps, ray={"instances": "all"})))
    until(lambda: len(joined(run.folder)) == 2)
    assert run.wait_for_events(run.events() + 10)
    run.kill_supervisor()
    run.resume()
    until(lambda: len(joined(run.folder)) == 4)
    nodes.add()
    until(lambda: any(name.startswith("i2.") for name in joined(run.folder)))
    assert run.broken(run.wait(), steps) == []
    nodes.lose()


def test_scale_on_a_cluster(nodes: Nodes, base: Path) -> None:
    steps = 80
    tree = ray_settings(base, steps, rollout={"instances": 1})
    run = RayRun(make_run(base, "scaled-on-ray", tree))
    until(lambda: len(joined(run.folder)) == 1)
    scale(run.folder, 2)
    until(lambda: len(joined(run.folder)) == 2)
    scale(run.folder, 1)
    assert run.broken(run.wait(), steps) == []
    assert any("i1.1 leaves" in notice for notice in run.notices())


def test_faults_on_a_cluster(nodes: Nodes, base: Path) -> None:
    RayChaos(nodes, base, 0).run()


def test_requests_move_through_the_object_store(nodes: Nodes) -> None:
    import ray

    from dora_rl.runtime.launch.ray.object_store import RayDataPlane

    data_plane = RayDataPlane(ray.remote(_FakeSupervisor).options(num_cpus=0).remote())
    source, collector = halfway()
    here = list(source.progress().tokens)
    name = data_plane.export(source, here)
    collector.collect(source.drain())
    target = tiny.engine(tiny.model("llama"), name="b")
    arrived, errors = target.import_(data_plane.fetch(name), 0)
    assert arrived == tuple(here)
    assert not errors
    collector.run(target)
    assert collector.responses == unmoved()
    assert len(collector.responses) == COUNT
    assert target.stats.reprefilled == 0
    with pytest.raises(BundleError, match="gone"):
        data_plane.fetch(name)
    with pytest.raises(StoreError, match="not there"):
        data_plane.lease(3)


class _FakeSupervisor:
    """As much of a supervisor as an instance needs."""

    def __init__(self) -> None:
        self._bundles: dict[str, Any] = {}

    def hold_bundle(self, name: str, bundle: list[Any]) -> None:
        self._bundles[name] = bundle

    def take_bundle(self, name: str) -> list[Any]:
        bundle: list[Any] = self._bundles.pop(name, [])
        return bundle

    def find_version(self, version: int) -> list[Any]:
        return []
