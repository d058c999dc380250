"""Processors that the kernels can be compiled for and run on here."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path

# Features that a compiler may use without being asked by the source: its macro, and the name in /proc/cpuinfo.
_FEATURES = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__LZCNT__": "abm",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__MOVBE__": "movbe",
    "__ADX__": "adx",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
}
X86 = ("x86-64", "x86-64-v3", "znver3", "x86-64-v4", "native")
"""Without AVX and FMA; with both; with both and AMD's tuning; with AVX-512; this one."""


@functools.cache
def runnable() -> list[str]:
    """Return the values of `-march` whose instructions this processor has, according to compiler and system."""
    if platform.machine() != "x86_64":
        return ["native"]
    return [arch for arch in X86 if arch == "native" or _has(arch)]


def _has(arch: str) -> bool:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return False  # without a compiler only the fallback is tested
    command = [compiler, f"-march={arch}", "-dM", "-E", "-x", "c++", "/dev/null"]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        return False  # the compiler is too old for it
    defined = {line.split()[1] for line in told.stdout.splitlines()}
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    return all(flag in flags for macro, flag in _FEATURES.items() if macro in defined)
