"""Two ranks with FSDP2 give the gradient, the weights, the errors and the checkpoints of one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.trainer import checkpoint
from dora_rl.trainer.rank_group import RankGroup
from dora_rl.weights.store import WeightStore
from tests.trainer.factories import assert_close, groups
from tests.trainer.two_processes import MODELS, main, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of one rank, and of two ranks that did the same."""
    path = tmp_path_factory.mktemp("rank_groups")
    main(path)
    (path / "store").rename(path / "store-of-1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "tests.trainer.two_processes", str(path)]
        processes.append(subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    return path


def results(folder: Path, size: int, rank: int = 0) -> Any:
    return torch.load(folder / f"results-{size}-{rank}.pt")


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_the_gradient_and_weights_of_one(folder: Path, name: str) -> None:
    one, two = results(folder, 1)[name], results(folder, 2)[name]
    if one["gradients"]:
        assert_close(two["gradients"], one["gradients"], 1e-5)
    for key, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][key], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["untied", "moe-alone", "corrected", "whole", "gaps"])
def test_all_ranks_report_the_metrics_of_one(folder: Path, name: str) -> None:
    one, two, other = (results(folder, *where)[name]["metrics"] for where in ((1,), (2, 0), (2, 1)))
    timed = {"tokens_per_second", "timing_s/train", "mfu", "kl", "correction/mean", "reference_kl"}
    assert ("off_policy/staleness_kl" in one) == (name == "gaps")
    for key in one.keys() - timed:
        assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-4), key
        assert other[key] == two[key], key


def test_values_are_reduced_on_the_device_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL can't reduce tensors in host memory."""

    class Values:
        def __init__(self, device: str) -> None:
            self.device = device

        def to(self, device: str) -> Values:
            return Values(device)

    exchanged: list[str] = []
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "nccl")
    monkeypatch.setattr("torch.distributed.all_reduce", lambda values, _: exchanged.append(values.device))
    values: Any = Values("cpu")
    rank_group = RankGroup(0, 2)
    reduced: list[Any] = [rank_group.sum(values), rank_group.max(values)]
    assert [result.device for result in reduced] == ["cpu", "cpu"]
    assert exchanged == ["cuda", "cuda"]


def test_every_rank_gets_the_ids_of_bad_trajectories(folder: Path) -> None:
    assert results(folder, 1)["culprits"] == {"trajectories": (11,)}
    assert results(folder, 2, 0)["culprits"] == results(folder, 2, 1)["culprits"] == {"trajectories": (11,)}


def test_a_sharded_trainer_publishes_full_tensors(folder: Path) -> None:
    store = WeightStore(folder / "store", keep=2)
    with store.lease(1) as lease, WeightStore(folder / "store-of-1", keep=2).lease(1) as single:
        assert lease.verify(lease.tensors()) == results(folder, 2)["published"]["fingerprint"]
        for name, tensor in single.tensors().items():
            torch.testing.assert_close(lease.tensors()[name], tensor, atol=2e-4, rtol=1e-3)


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_the_reverse(folder: Path) -> None:
    straight = make("untied", RankGroup())
    straight.accumulate(0, groups(count=3, seed=1))
    straight.apply(0)
    resumed = make("untied", RankGroup())
    path = checkpoint.latest(folder / "saved-by-2")
    assert path is not None
    assert checkpoint.restore(path, resumed).last_step == {"saved by": 2}
    for made in (straight, resumed):
        made.accumulate(1, groups(count=3, seed=2, version=1))
        made.apply(1)
    for name, tensor in straight.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(results(folder, 2)["resumed"]["weights"][name], tensor, atol=2e-4, rtol=1e-3)
