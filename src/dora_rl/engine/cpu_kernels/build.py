"""Compiles the kernels for the machine that they run on, once, into the user's cache.

Invariants:
- the name of a library is a hash of its sources, its compiler and this processor, so a stale or foreign one is never
  used;
- a finished library appears under its name atomically; if several processes need it, one compiles it;
- the compiler contracts no floating-point operations on its own: every rounding is in the sources (see vectors.h);
- a library that lays out its structs in another way than Python fills them is not used;
- a machine without a compiler is no error: `build()` returns None and the reason, and torch computes instead.

The environment variable DORA_RL_ARCH names another processor to compile for, as `-march=` takes it, and CXX another
compiler than the first of g++ and clang++ that is found.
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
    "-Wno-psabi",  # the ABI for vectors wider than a register may vary; all callers are compiled together
    "-pthread",
    "-fPIC",
)
BUILD_SECONDS = 300


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dora-rl" / "kernels"


def build() -> tuple[ctypes.CDLL | None, str]:
    """Return the loaded library, or None and the reason."""
    compiler = _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    if not compiler:
        return None, "there is no C++ compiler (g++ or clang++)"
    return build_for(compiler, os.environ.get("DORA_RL_ARCH") or "native")


@functools.cache
def build_for(compiler: str, arch: str) -> tuple[ctypes.CDLL | None, str]:
    """Return the library for this compiler and processor, or None and the reason."""
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
        messages = error.stderr.strip().splitlines()
        return None, f"{compiler} failed: {messages[0] if messages else error.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, if this machine can compile them."""
    return build()[0]


def processor_flag(arch: str) -> str:
    """Return the flag that selects the processor, for g++ and clang++ alike."""
    return "-mcpu=native" if arch == "native" and platform.machine() in ("aarch64", "arm64") else f"-march={arch}"


@functools.cache
def _find_compiler(chosen: str, path: str) -> str:
    return chosen or shutil.which("g++", path=path) or shutil.which("clang++", path=path) or ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lock for the process that compiles; where files can't be locked, several processes compile the same library."""
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
    """Return what `-march=native` depends on: machines with different processors may share a home folder."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
