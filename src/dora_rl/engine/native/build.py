"""Compiling the kernels for the machine they run on, once, into the user's cache.

Invariants:
- the library's name is a hash of its sources, its compiler and this processor, so a stale or foreign one is never used;
- a finished library appears under its name in one step, so two processes can build at once;
- a machine without a compiler is no error: `library()` gives None and says why, and torch does the work.

The environment variable DORA_RL_ARCH names another processor to compile for than this one, as `-march=` takes it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from dora_rl.engine.native.binding import declare

SOURCES = ("forward.cpp", "sample.cpp", "stretch.cpp")
HEADERS = ("attention.h", "draws.h", "product.h", "team.h", "vectors.h")
FLAGS = (
    "-O3",
    f"-march={os.environ.get('DORA_RL_ARCH', 'native')}",
    "-std=gnu++20",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-pthread",
    "-fPIC",
    "-shared",
)
BUILD_SECONDS = 300


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dora-rl" / "kernels"


@functools.lru_cache(maxsize=1)
def build() -> tuple[ctypes.CDLL | None, str]:
    """The loaded library, or None and the reason."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None, "there is no C++ compiler (g++ or clang++)"
    target = cache_folder() / f"{_key(compiler)}.so"
    try:
        if not target.exists():
            _compile(compiler, target)
        return declare(ctypes.CDLL(str(target))), ""
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return None, f"{compiler} failed: {said[0] if said else error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def library() -> ctypes.CDLL | None:
    """The compiled kernels, if this machine can have them."""
    return build()[0]


def _compile(compiler: str, target: Path) -> None:
    here = Path(__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [compiler, *FLAGS, *(str(here / name) for name in SOURCES), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)  # noqa: S603
        fresh.replace(target)


def _key(compiler: str) -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256(repr((compiler, FLAGS, platform.machine(), _processor())).encode())
    for name in (*SOURCES, *HEADERS):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by machines of different kinds."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
