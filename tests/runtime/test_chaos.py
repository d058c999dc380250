"""A short `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos_run import one
from tests.runtime.host import Host


@pytest.mark.parametrize("seed", range(5))
def test_whole_runs_survive_faults(host: Host, base: Path, seed: int) -> None:
    _, failure, _ = one(host, base, seed)
    assert failure == ""
