"""The wheel and the sdist have what a run needs, and nothing else; the quickstart needs no other file.

`make test-package` installs the wheel in a new virtual environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import packages

pytest.importorskip("hatchling", reason="`make setup` installs hatchling")

SOURCE = packages.ROOT / "src"
NEEDED = (
    "dora_rl/py.typed",
    "dora_rl/apps/pages/compare.html",
    "dora_rl/apps/pages/report.html",
    "dora_rl/apps/serve/static/app.js",
    "dora_rl/engine/cpu_kernels/forward.cpp",
    "dora_rl/engine/cpu_kernels/team.h",
    "dora_rl/quickstart/quickstart.toml",
    "dora_rl/quickstart/task.py",
    "dora_rl/quickstart/warm/model.safetensors",
    "dora_rl/quickstart/warm/tokenizer.json",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> packages.Packages:
    return packages.build(tmp_path_factory.mktemp("dist"))


def sources() -> set[str]:
    """All files of the package; the example that is linked into it counts."""
    found = (
        Path(folder) / name
        for folder, _, names in os.walk(SOURCE / "dora_rl", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    )
    return {path.relative_to(SOURCE).as_posix() for path in found}


def test_the_wheel_has_the_files_of_the_package_and_nothing_else(built: packages.Packages) -> None:
    names = {name for name in packages.files(built.wheel) if not name.startswith("dora_rl-")}
    assert names == sources() - {"dora_rl/quickstart/warm_start.py"}
    assert set(NEEDED) <= names


def test_the_sdist_gives_the_same_wheel(built: packages.Packages, tmp_path: Path) -> None:
    source = packages.unpack(built.sdist, tmp_path / "source")
    assert {path.name for path in source.iterdir()} == {
        "src",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "PKG-INFO",
        ".gitignore",
    }
    again = packages.build(tmp_path / "dist", source)
    assert packages.files(again.wheel) == packages.files(built.wheel)


def test_the_quickstart_of_the_wheel_needs_no_clone(built: packages.Packages, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(site)
    command = [sys.executable, "-m", "dora_rl.apps.cli", "quickstart", "--dry-run", "--control.steps", "3"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    config = tomllib.loads(done.stdout)
    assert config["control"]["steps"] == 3
    assert config["model"]["path"] == str(site / "dora_rl" / "quickstart" / "warm")
    assert list(elsewhere.iterdir()) == []
