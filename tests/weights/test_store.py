"""Published weights are complete, verified, shared without a copy and held by leases; only the newest ones are kept."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dora_rl.core.errors import FingerprintError, StoreError
from dora_rl.models.dtypes import spec
from dora_rl.models.fingerprint import fingerprint
from dora_rl.weights.store import WeightStore


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.full((33, 7), value),
        "norm": torch.arange(5).float() + value,
        "half": torch.full((3,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 4),
    }


def publish(store: WeightStore, version: int) -> str:
    made = tensors(version)
    return store.publish(version, [spec(name, tensor) for name, tensor in made.items()], made.values())


def test_loaded_tensors_equal_the_published_ones(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=2)
    found = publish(store, 3)
    assert found == fingerprint(tensors(3)) == store.manifest(3).fingerprint
    with store.lease(3) as lease:
        for name, tensor in lease.tensors().items():
            assert torch.equal(tensor, tensors(3)[name])
        assert lease.tensors().keys() == tensors(3).keys()
        assert lease.verify(lease.tensors()) == found
    with safe_open(store.path(3), "pt") as file:  # any reader of safetensors can open it
        assert file.metadata()["version"] == "3"


def test_the_fingerprint_covers_name_dtype_shape_and_bytes() -> None:
    base = {"a": torch.arange(6).float(), "b": torch.ones(2)}
    others = [
        {"a": torch.arange(6).float(), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.arange(6).float().reshape(2, 3), "b": torch.ones(2)},
        {"a": torch.arange(6).float(), "c": torch.ones(2)},
        {"a": torch.arange(6).float(), "b": torch.ones(2).view(torch.int32)},
        {"a": torch.arange(6).float()},
    ]
    assert len({fingerprint(other) for other in [base, *others]}) == 6
    assert fingerprint(dict(reversed(base.items()))) == fingerprint(base)
    strided = torch.arange(12).float().reshape(6, 2)[:, 0]
    assert fingerprint({"a": strided}) == fingerprint({"a": strided.contiguous()})


def test_serving_other_weights_than_published_is_an_error(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=2)
    publish(store, 1)
    with store.lease(1) as lease, pytest.raises(FingerprintError, match="version 1 was published with"):
        lease.verify(tensors(0))


def test_only_the_newest_versions_take_space(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=3)
    for version in range(8):
        publish(store, version)
        assert store.versions() == list(range(max(0, version - 2), version + 1))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        f"v0000000{n}.safetensors" for n in (5, 6, 7)
    ]


def test_a_leased_version_is_kept_until_its_last_lease_ends(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=1)
    publish(store, 0)
    first, second = store.lease(0), store.lease(0)
    publish(store, 1)
    assert store.versions() == [0, 1]
    assert store.holders(0) == 2
    with pytest.raises(StoreError, match="version 0 can't be retired: it has 2 leases"):
        store.retire(0)
    mapped = first.tensors()
    first.close()
    assert store.versions() == [0, 1]
    second.close()
    assert store.versions() == [1]
    assert torch.equal(mapped["layer.weight"], tensors(0)["layer.weight"]), "mapped tensors stay valid"
    assert not any((tmp_path / "leases").iterdir())


def test_retire_frees_and_unknown_versions_are_named(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=4)
    publish(store, 4)
    publish(store, 5)
    store.retire(4)
    with pytest.raises(StoreError, match="version 4 is not in the store, which has: 5"):
        store.lease(4)


def test_a_version_is_published_again_only_with_the_same_weights(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=4)
    first = publish(store, 5)
    assert publish(store, 5) == first
    other = {"norm": torch.zeros(3)}
    with pytest.raises(FingerprintError, match="version 5 is already published with the fingerprint"):
        store.publish(5, [spec("norm", other["norm"])], other.values())
    assert store.manifest(5).fingerprint == first
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "leases", "v00000005.safetensors"}


def _hold(folder: str, ready: Any) -> None:
    lease = WeightStore(Path(folder), keep=1).lease(0)
    ready.set()
    signal.pause()
    lease.close()


def test_a_lease_ends_when_its_process_is_killed(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=1)
    publish(store, 0)
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(60)
    publish(store, 1)
    assert store.holders(0) == 1
    assert store.versions() == [0, 1]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert store.holders(0) == 0
    assert store.prune() == [0]


def test_a_failed_publish_leaves_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=2)
    made = tensors(0)

    def breaking() -> Any:
        yield made["layer.weight"]
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        store.publish(0, [spec(name, tensor) for name, tensor in made.items()], breaking())
    assert store.versions() == []
    assert {path.name for path in tmp_path.iterdir()} <= {".lock", "leases"}


def _kilobytes(path: Path, kind: str) -> int:
    """The memory of this process's mappings of a file, according to Linux."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field = line.split(" ")[0]
        if "-" in field and not field.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and field == f"{kind}:":
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc, which Linux has")
def test_loading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, keep=1)
    big = {"big": torch.randn(4 << 20)}
    store.publish(0, [spec("big", big["big"])], big.values())
    with store.lease(0) as lease:
        found = lease.tensors()["big"]
        assert float(found.sum()) == float(big["big"].sum())  # touches every page
        assert _kilobytes(store.path(0), "Rss") >= 16 << 10
        assert _kilobytes(store.path(0), "Anonymous") == 0, "pages were copied"
        assert found.data_ptr() % 64 == 0


def test_repeated_loads_take_no_memory(tmp_path: Path) -> None:
    many = {f"layer.{number}": torch.full((3,), float(number)) for number in range(500)}
    store = WeightStore(tmp_path, keep=1)
    store.publish(0, [spec(name, tensor) for name, tensor in many.items()], many.values())

    def load(times: int) -> int:
        """Load the version this often; returns the kilobytes of anonymous memory afterwards."""
        for _ in range(times):
            with store.lease(0) as lease:
                assert len(lease.tensors()) == 500
        found = re.search(r"Anonymous: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
        assert found is not None
        return int(found[1])

    before = load(20)
    assert load(60) - before < 500, "a leak of some dozens of bytes per loaded tensor"
