"""Settings of a Ray cluster, as they are handed to Ray; Ray itself need not be there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.ray import init as start
from tests.settings.workers import tree_with


def config(base: Path, **ray: Any) -> RunConfig:
    return build(RunConfig, tree_with(base, {"runtime": "ray", "ray": ray}))


def test_a_process_takes_of_the_cluster_what_it_was_told(base: Path) -> None:
    """`num_cpus`, `num_gpus` and `resources` of `instance`, `trainer` and `reward`."""
    need = {"num_cpus": 2.0, "num_gpus": 1.0, "resources": {"rollout": 0.5}}
    assert config(base, instance=need).ray.instance.bundle() == {"CPU": 2.0, "GPU": 1.0, "rollout": 0.5}
    alone = start._cpus(config(base))  # two instances, one rank, one reward worker
    assert start._cpus(config(base, instance={"num_cpus": 3.0})) == alone + 4
    assert start._cpus(config(base, trainer={"num_cpus": 3.0})) == alone + 2
    assert start._cpus(config(base, reward={"num_cpus": 2.5})) == alone + 2


@pytest.mark.parametrize("address", ["", "somewhere:6379"])
def test_the_cluster_is_the_one_that_was_named(base: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.address`; without one a cluster of this machine is begun."""
    asked: dict[str, Any] = {}
    ray = SimpleNamespace(is_initialized=lambda: False, init=asked.update, shutdown=lambda: None)
    ray.init = lambda **settings: asked.update(settings)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with start.cluster(config(base, address=address)):
        pass
    assert asked["address"] == (address or "local")
