"""Compiling the kernels for the machine they run on, once, into the user's cache.

Invariants:
- the library's name is a hash of its sources, its compiler and this processor, so a stale or foreign one is never used;
- a finished library appears under its name in one step; of processes that want it at once, one compiles it;
- the compiler contracts no floating-point operations by itself: every rounding is in the sources (see vectors.h);
- a library whose structs lie otherwise in memory than Python fills them is not used;
- a machine without a compiler is no error: `library()` gives None and says why, and torch does the work.

The environment variable DORA_RL_ARCH names another processor to compile for than this one, as `-march=` takes it, and
CXX another compiler than the first of g++ and clang++ that is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dora_rl.engine.cpu_kernels.binding import declare, mismatch

SOURCES = ("forward.cpp", "layout.cpp", "sample.cpp", "stretch.cpp")
HEADERS = ("attention.h", "interface.h", "product.h", "team.h", "vectors.h")
FLAGS = (
    "-O3",
    "-std=gnu++20",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wno-psabi",  # vectors wider than a register are passed in a way of their own; no caller is compiled apart
    "-pthread",
    "-fPIC",
)
BUILD_SECONDS = 300


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dora-rl" / "kernels"


def build() -> tuple[ctypes.CDLL | None, str]:
    """The loaded library, or None and the reason."""
    compiler = _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    if not compiler:
        return None, "there is no C++ compiler (g++ or clang++)"
    return build_for(compiler, os.environ.get("DORA_RL_ARCH") or "native")


@functools.cache
def build_for(compiler: str, arch: str) -> tuple[ctypes.CDLL | None, str]:
    """The library by this compiler for this processor, or None and the reason."""
    flags = (*FLAGS, processor_flag(arch))
    target = cache_folder() / f"{_key(compiler, flags)}.so"
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with _lock(target.with_suffix(".lock")):
                if not target.exists():
                    _compile(compiler, flags, target)
        loaded = declare(ctypes.CDLL(str(target)))
        wrong = mismatch(loaded)
        return (None, f"{compiler} lays out the kernels' structs in another way: {wrong}") if wrong else (loaded, "")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return None, f"{compiler} failed: {said[0] if said else error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def library() -> ctypes.CDLL | None:
    """The compiled kernels, if this machine can have them."""
    return build()[0]


def processor_flag(arch: str) -> str:
    """What tells g++ and clang++ alike which processor to compile for."""
    return "-mcpu=native" if arch == "native" and platform.machine() in ("aarch64", "arm64") else f"-march={arch}"


@functools.cache
def _find_compiler(chosen: str, path: str) -> str:
    return chosen or shutil.which("g++", path=path) or shutil.which("clang++", path=path) or ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by the one process that compiles; where files can't be locked, several compile the same."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        command = [compiler, *flags, "-shared", *(str(here / name) for name in SOURCES), "-o", str(fresh)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)  # noqa: S603
        fresh.replace(target)


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256(repr((compiler, flags, platform.machine(), _processor())).encode())
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
