"""A short run of `tests.fuzz`: unreadable input raises a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import fuzz, targets

INPUTS = {"ledgers": 25, "weights": 100}


@pytest.mark.parametrize(
    "name", ["frames and messages", "bundles", "configs", "run folders", "traces", "weights", "ledgers"]
)
def test_no_input_crashes(name: str, tmp_path: Path) -> None:
    valid, feed = targets(tmp_path)[name]
    feed(valid)
    fuzz(valid, feed, INPUTS.get(name, 200))
