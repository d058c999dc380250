"""The capacity of a cluster for instances, computed without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="the Ray runtime requires the extra `ray`")

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.ray import nodes
from dora_rl.runtime.launch.ray.init import _cpus
from tests.runtime.making import merged
from tests.runtime.test_supervisor import TREE


def config(**other: Any) -> RunConfig:
    return build(RunConfig, merged({**TREE, "runtime": "ray", "data": {"source": "d", "held_out": 1}}, other))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, float]]:
    has: dict[str, dict[str, float]] = {"here": {"CPU": 4.0}, "there": {"CPU": 3.0}}
    monkeypatch.setattr(nodes, "nodes", lambda: {node: dict(own) for node, own in has.items()})
    return has


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({}, 6),
        ({"trainer": {"ranks": 3}}, 4),
        ({"trainer": {"ranks": 9}}, 3),  # ranks run only on the supervisor's node
        ({"trainer": {"ranks": 3}, "ray": {"shared_folder": True}}, 4),
        ({"trainer": {"ranks": 9}, "ray": {"shared_folder": True}}, 0),
        ({"evaluation": {"every": 2}}, 5),
        ({"evaluation": {"every": 2}, "trainer": {"ranks": 3}}, 3),
        ({"ray": {"shared_folder": True, "instance": {"num_cpus": 3}}}, 1),
        ({"ray": {"instance": {"resources": {"rollout": 1}}}}, 0),
    ],
)
def test_ranks_and_evaluator_have_room_beside_the_instances(
    cluster: dict[str, dict[str, float]], other: dict[str, Any], found: int
) -> None:
    assert nodes.capacity(config(**other), "here") == found


def test_an_instance_comes_before_the_evaluator(cluster: dict[str, dict[str, float]]) -> None:
    del cluster["there"]
    cluster["here"]["CPU"] = 2.0
    assert nodes.capacity(config(evaluation={"every": 2}), "here") == 1


def test_a_trainer_on_any_node_can_not_publish_to_memory() -> None:
    with pytest.raises(ConfigError, match=r"'weights' must be 'disk' with 'ray\.shared_folder'"):
        config(ray={"shared_folder": True}, weights="memory")
    assert config(weights="memory").weights == "memory"


def test_a_cluster_of_this_machine_has_cores_for_all_ranks() -> None:
    assert _cpus(config(trainer={"ranks": 4})) - _cpus(config()) == 3
