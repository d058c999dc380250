"""Fixtures of the engine's tests."""

from __future__ import annotations

import ctypes

import pytest

from dora_rl.engine.cpu_kernels import runner


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' models count as small on every machine, whatever its caches."""

    def cache_budget(_library: ctypes.CDLL) -> int:
        return 1 << 20

    monkeypatch.setattr(runner, "cache_budget", cache_budget)
