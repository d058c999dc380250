"""Shared by the tests of the Python API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl import DoraConfig
from tests.runtime.making import make_base, settings


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the model and the task of the small job; runs are below it."""
    return make_base(tmp_path_factory.mktemp("job"))


def small(job: Path, **control: Any) -> DoraConfig:
    """The settings of the small job, without what the arguments of `train` supply."""
    tree = settings(job, **control)
    del tree["model"], tree["data"], tree["reward"]["functions"]
    return DoraConfig(**tree)


def children() -> set[str]:
    """Processes that this one has started and that are still alive."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][:1]
            found |= set() if state in "ZX" else {child}
    return found
