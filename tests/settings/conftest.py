"""Shared by the tests of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.making import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with model and task of the small job; runs are below it."""
    return make_base(tmp_path_factory.mktemp("settings"))
