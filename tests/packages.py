"""Builds the wheel and the sdist of this repository, without the network."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Packages(NamedTuple):
    """What a release consists of."""

    wheel: Path
    sdist: Path


def build(out: Path, source: Path = ROOT) -> Packages:
    """Build both with hatchling, which must be installed."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=600)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Packages(wheel, sdist)


def files(wheel: Path) -> dict[str, bytes]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist; returns its folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    return top
