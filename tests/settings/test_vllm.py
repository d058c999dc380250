"""Settings of vLLM, as they reach its engine's arguments; vLLM itself need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.config import build
from dora_rl.engine.vllm import core, serving
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.workers import engine_factory as engines
from tests.settings.workers import tree_with


def given(base: Path, **vllm: Any) -> dict[str, Any]:
    config = build(RunConfig, tree_with(base, {"rollout": {"engine": {"kind": "vllm", "vllm": vllm}}}))
    return core.arguments(config.model, config.rollout.engine, slots=1, lora=None, seed=1)


def test_vllm_gets_its_arguments(base: Path) -> None:
    assert given(base)["enforce_eager"] is True  # on a CPU
    assert given(base, enforce_eager=False)["enforce_eager"] is False
    assert given(base, tensor_parallel_size=2)["tensor_parallel_size"] == 2
    assert given(base, gpu_memory_utilization=0.5)["gpu_memory_utilization"] == 0.5
    assert given(base, block_size=64)["block_size"] == 64
    assert given(base, arguments={"max_num_batched_tokens": 512})["max_num_batched_tokens"] == 512
    assert "kv_transfer_config" in given(base)
    assert "kv_transfer_config" not in given(base, move_kv=False)


def test_an_engine_of_vllm_goes_by_the_common_settings_too(base: Path) -> None:
    """`max_requests`, `max_context` and `kv_bytes`."""
    found = given(base)
    assert (found["max_num_seqs"], found["max_model_len"]) == (4, 80)
    assert found["kv_cache_memory_bytes"] == 1 << 22


@pytest.mark.parametrize("prove", [True, False])
def test_weights_are_proven_unless_told_otherwise(base: Path, prove: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prove` reaches what loads the weights."""
    found: dict[str, Any] = {}

    class ToldError(Exception):
        """What was looked for has been seen."""

    def weights(*_: Any, **settings: Any) -> None:
        found.update(settings)
        raise ToldError

    monkeypatch.setattr(core, "Core", lambda *_, **__: None)
    monkeypatch.setattr(serving, "AllWeights", weights)
    tree = tree_with(base, {"rollout": {"engine": {"kind": "vllm", "vllm": {"prove": prove}}}})
    store: Any = None
    with pytest.raises(ToldError):
        engines.make_engine(build(RunConfig, tree), store, "i0.1", 1, lambda: 0)
    assert found["prove"] is prove
