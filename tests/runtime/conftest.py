"""Shared by the tests of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.host import Host
from tests.runtime.making import make_base


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Starts supervisors."""
    host = Host()
    yield host
    host.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with model and task of the small job; runs are below it."""
    return make_base(tmp_path_factory.mktemp("job"))
