"""Runs model-written code in a confined process.

Invariants:
- the code runs in its own process, with its own folder and without the parent's environment variables or open files;
- when `run` returns, or its caller dies, that process is dead, and it can't have started another;
- the folder is removed after the run; folders of callers that were killed are removed by the next sandbox;
- with `strict`, code never runs unless all guarantees hold.

The guarantees: `network`: no socket can be opened. `files`: nothing outside the folder can be read, listed or changed,
except that the libraries of the interpreter and the system can be read; the bytes written are limited. `memory`: the
address space is limited. `processes`: no other process can be started, signalled or inspected; threads are limited.
`time`: wall-clock and CPU time are limited.

The kernel does not limit the bytes written over all files, the number of threads and the size of the output. These
three are polled every 20 ms, so a process can exceed them by what it does between two polls.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import Field

from dora_rl.core.config import Config
from dora_rl.core.errors import SandboxError
from dora_rl.core.types import Record
from dora_rl.envs.sandbox.jail import MAIN
from dora_rl.envs.sandbox.scratch import run_folder, sweep, too_large, write

GUARANTEES = frozenset({"network", "files", "memory", "processes", "time"})
_ROOT = Path(__file__).parents[3]
_START = "import sys; sys.path.insert(0, sys.argv[1]); from dora_rl.envs.sandbox.jail.inside import main; main()"
# Shared libraries that extension modules load, time zones, and devices without data.
_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
             "/dev/urandom", "/dev/random", "/dev/zero")  # fmt: skip
_POLL_MILLISECONDS = 20


class SandboxLimits(Config):
    """The resources that one run may use."""

    wall_seconds: float = Field(default=10.0, gt=0)
    cpu_seconds: float = Field(default=10.0, gt=0)
    """Rounded up to whole seconds."""
    memory_bytes: int = Field(default=512 << 20, ge=64 << 20)
    """Address space, including the 40 MB of the interpreter."""
    output_bytes: int = Field(default=1 << 20, ge=0)
    """Limit of stdout and of stderr, each."""
    disk_bytes: int = Field(default=32 << 20, ge=0)
    """All files in its folder together."""
    disk_entries: int = Field(default=1000, ge=0)
    """Files and folders in its folder."""
    open_files: int = Field(default=64, ge=16)
    threads: int = Field(default=32, ge=1)


class Outcome(Record, frozen=True, kw_only=True):
    """The result of a run."""

    stdout: str
    stderr: str
    exit_code: int
    """Exit code of the process; the negative signal number if a signal ended it."""
    timed_out: bool = False
    reason: str | None = None
    """The limit that ended the run; None if the code ended by itself, with or without an error."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.reason is None


class Sandbox:
    """Runs Python code within limits."""

    def __init__(
        self, limits: SandboxLimits | None = None, *, strict: bool = True, guards: Iterable[str] = GUARANTEES
    ) -> None:
        self._limits = limits or SandboxLimits()
        self._strict = strict
        self._guards = frozenset(guards)
        self._slow = f"ran longer than {self._limits.wall_seconds:g} s"
        self._busy = f"used more CPU time than {math.ceil(self._limits.cpu_seconds)} s"
        if strict:
            _refuse(_missing() | dict.fromkeys(GUARANTEES - self._guards, "it is switched off"))
        sweep()

    @staticmethod
    def guarantees() -> frozenset[str]:
        """The guarantees that hold on this system, found by requesting each from the kernel."""
        return GUARANTEES - _missing().keys()

    def run(self, code: str, stdin: str = "", files: Mapping[str, str] | None = None) -> Outcome:
        """Run Python code until it ends or exceeds a limit."""
        with run_folder() as folder:
            work = folder / "work"
            for name, text in {**_checked(files or {}), MAIN: code}.items():
                write(work / name, text)
            write(folder / "stdin", stdin)
            reason, exit_code = self._watch(self._start(folder, work), folder)
            if self._strict:
                _refuse(_report(folder))
            return Outcome(
                stdout=self._read(folder / "stdout"),
                stderr=self._read(folder / "stderr"),
                exit_code=exit_code,
                timed_out=reason in (self._slow, self._busy),
                reason=reason,
            )

    def missing(self) -> dict[str, str]:
        """Guarantees that this system can't give, with the reason, as an empty run reports them."""
        with run_folder() as folder:
            write(folder / "work" / MAIN, "")
            write(folder / "stdin", "")
            self._watch(self._start(folder, folder / "work"), folder)
            return _report(folder)

    def _start(self, folder: Path, work: Path) -> subprocess.Popen[bytes]:
        environment = {"HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8", "PATH": ""}
        # Buffers that libraries allocate for each core or thread would exceed the memory limit before any computation.
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        command = [sys.executable, "-I", "-X", "utf8", "-c", _START, str(_ROOT), self._plan(folder)]
        with (
            (folder / "stdin").open("rb") as stdin,
            (folder / "stdout").open("wb") as stdout,
            (folder / "stderr").open("wb") as stderr,
        ):
            return subprocess.Popen(  # noqa: S603
                command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=work, env=environment, start_new_session=True
            )

    def _plan(self, folder: Path) -> str:
        limits = self._limits
        numbers = {
            "memory": limits.memory_bytes,
            "cpu": math.ceil(limits.cpu_seconds),
            "open_files": limits.open_files,
            "written": max(limits.disk_bytes, limits.output_bytes),
        }
        plan = {"parent": os.getpid(), "report": str(folder / "report"), "strict": self._strict, "limits": numbers}
        return json.dumps({**plan, "guards": sorted(self._guards), "readable": sorted(_library())})

    def _watch(self, process: subprocess.Popen[bytes], folder: Path) -> tuple[str | None, int]:
        """Poll the process until it ends; kill it if it exceeds a limit. It is dead when this returns or raises."""
        reason = None
        deadline = time.monotonic() + self._limits.wall_seconds
        handle = os.pidfd_open(process.pid)
        end = select.poll()
        end.register(handle, select.POLLIN)
        try:
            while reason is None and not end.poll(_POLL_MILLISECONDS):
                reason = self._slow if time.monotonic() > deadline else self._excess(process.pid, folder)
        finally:
            os.close(handle)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if reason is None and self._spent(process.returncode, used.ru_utime + used.ru_stime):
            reason = self._busy
        return reason or self._excess(None, folder), process.returncode

    def _spent(self, exit_code: int, seconds: float) -> bool:
        """Whether the kernel ended it for its CPU time, which is counted in ticks and so may be reported as less."""
        killed = exit_code == -signal.SIGKILL and seconds > 0.75 * math.ceil(self._limits.cpu_seconds)
        return exit_code == -signal.SIGXCPU or killed

    def _excess(self, pid: int | None, folder: Path) -> str | None:
        """The limit that is exceeded, if any."""
        limits = self._limits
        for name in ("stdout", "stderr"):
            if (folder / name).stat().st_size > limits.output_bytes:
                return f"wrote more than {limits.output_bytes} bytes to {name}"
        if too_large(folder / "work", limits.disk_bytes, limits.disk_entries):
            return f"wrote more than {limits.disk_bytes} bytes or {limits.disk_entries} files"
        if pid is not None and _threads(pid) > limits.threads:
            return f"started more than {limits.threads} threads"
        return None

    def _read(self, path: Path) -> str:
        with path.open("rb") as file:
            return file.read(self._limits.output_bytes).decode("utf-8", "replace")


@cache
def _library() -> frozenset[str]:
    """The interpreter's library and packages, and the libraries of the system."""
    paths = sysconfig.get_paths()
    own = (paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return frozenset({*_READABLE, *own, str(Path(sys.base_prefix, "lib"))})


@cache
def _missing() -> dict[str, str]:
    """The guarantees that this system can't give, with the reason."""
    if sys.platform != "linux":
        return dict.fromkeys(GUARANTEES, "it needs Linux")
    return Sandbox(strict=False).missing()


def _refuse(missing: Mapping[str, str]) -> None:
    if missing:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(missing.items()))
        raise SandboxError(f"code can't be run safely here, since a guarantee is missing: {reasons}")


def _report(folder: Path) -> dict[str, str]:
    """The missing guarantees that the process reported before it ran the code."""
    try:
        missing: dict[str, str] = json.loads((folder / "report").read_bytes())
    except (OSError, ValueError):
        why = (folder / "stderr").read_text(errors="replace").strip().rpartition("\n")[2]
        return dict.fromkeys(GUARANTEES, f"the sandbox did not start ({why[:200]})")
    return missing


def _checked(files: Mapping[str, str]) -> Mapping[str, str]:
    for name in files:
        steps = Path(name).parts
        if not steps or Path(name).is_absolute() or ".." in steps or "\0" in name or steps == (MAIN,):
            raise SandboxError(f"a file for the sandbox can't be called {name!r}: give a relative name, not {MAIN}")
    return files


def _threads(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return 0
