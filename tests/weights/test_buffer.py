"""A version received as bytes gives the published tensors without a copy, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.core.errors import FingerprintError, StoreError
from dora_rl.weights.buffer import WeightBuffer
from dora_rl.weights.store import WeightStore
from tests.weights.test_store import publish, tensors


def data(tmp_path: Path, version: int = 3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    store = WeightStore(tmp_path, keep=2)
    publish(store, version)
    read = np.frombuffer(store.path(version).read_bytes(), dtype=np.uint8).copy()
    read.flags.writeable = False
    return read


def test_a_buffer_has_the_published_tensors_without_a_copy(tmp_path: Path) -> None:
    sent = data(tmp_path)
    buffer = WeightBuffer(3, sent)
    found = buffer.tensors()
    assert found.keys() == tensors(3).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(3).items())
    assert buffer.verify(found) == buffer.manifest.fingerprint == WeightStore(tmp_path, keep=2).manifest(3).fingerprint
    begin = sent.ctypes.data
    assert begin <= found["layer.weight"].data_ptr() < begin + len(sent)


def test_other_weights_are_not_served(tmp_path: Path) -> None:
    sent = data(tmp_path).copy()
    sent[-1] ^= 0x40
    buffer = WeightBuffer(3, sent)
    with pytest.raises(FingerprintError):
        buffer.verify(buffer.tensors())


def test_bytes_that_are_not_a_version_are_refused(tmp_path: Path) -> None:
    sent = data(tmp_path)
    size = int.from_bytes(sent[:8].tobytes(), "little")
    header = json.loads(sent[8 : 8 + size].tobytes())

    def with_header(changed: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        text = json.dumps(changed).encode().ljust(size)
        return np.frombuffer(len(text).to_bytes(8, "little") + text + sent[8 + size :].tobytes(), dtype=np.uint8)

    for broken in (sent[:0], sent[:5], sent[: size // 2], with_header({}), with_header({"__metadata__": 3})):
        with pytest.raises(StoreError, match="damaged"):
            WeightBuffer(3, broken)
    with pytest.raises(StoreError, match="version 3"):
        WeightBuffer(4, sent)
    for entry in (
        {"data_offsets": [0, 1 << 40]},
        {"shape": [1 << 40]},
        {"shape": [-3, -7]},
        {"dtype": "F7"},
        {"dtype": "U8"},
        {"data_offsets": 3},
    ):
        changed = {**header, "layer.weight": header["layer.weight"] | entry}
        with pytest.raises(StoreError, match="damaged"):
            WeightBuffer(3, with_header(changed)).tensors()
