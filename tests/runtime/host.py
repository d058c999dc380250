"""A process that has imported all modules and forks supervisors, so that a run starts in a fraction of a second.

The supervisors are real and run in separate processes, which tests can kill, stop and interrupt. The first fork server
of a supervisor is forked as well; its replacement is started as usual. `python -m tests.runtime.host` reads one order
(a line of JSON) at a time from standard input and replies with the process id of the supervisor.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from dora_rl.runtime.launch import fork_server as forks
from dora_rl.runtime.launch.fork_server import _IMPORTS, ForkServer, serve
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.making import PATIENCE


class Forked:
    """A child process with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if end is not None and time.monotonic() > end:
                    raise subprocess.TimeoutExpired("fork_server", timeout or 0.0)
                time.sleep(0.005)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class QuickForkServer(ForkServer):
    """A fork server that has nothing left to import. It writes the ids of the processes that it forks to a file."""

    timeout = PATIENCE  # the first is forked immediately, but a replacement has to import all modules

    def fork(self, link: socket.socket, log: IO[bytes]) -> forks.Forked:
        forked = super().fork(link, log)
        self._note(f"reaper-{Path(log.name).stem}", forked.reaper)
        self._note(Path(log.name).stem, forked.pid)
        return forked

    def _start(self) -> tuple[socket.socket, int]:
        started = super()._start() if hasattr(self, "_process") else self._fork_server()
        self._note("fork_server", started[1])
        return started

    def _fork_server(self) -> tuple[socket.socket, int]:
        parent_end, child_end = socket.socketpair()
        parent_end.settimeout(self.timeout)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # As after `exec`, no descriptor of the supervisor stays open here; its lock file in particular must not.
            kept_fd = child_end.fileno()
            os.closerange(3, kept_fd)
            os.closerange(kept_fd + 1, os.sysconf("SC_OPEN_MAX"))
            os.setsid()
            serve(child_end, parent)
            os._exit(0)
        child_end.close()
        self._process: Any = Forked(pid)
        return parent_end, pid

    def _note(self, worker_id: str, pid: int) -> None:
        with (self._log.parent / "pids").open("a") as file:
            file.write(f"{worker_id} {pid}\n")


def supervise(order: dict[str, Any]) -> int:
    """Execute a run until it ends, and return the exit code that `dora-rl train` would have."""
    from dora_rl.core.errors import IntegrityError, RunError, UserError
    from dora_rl.runtime.resume import change
    from dora_rl.runtime.supervisor.run import Run
    from tests.runtime.faults import machine

    folder = RunDir(Path(order["folder"]))
    before = _descriptors()
    outcome: dict[str, Any] = {"notices": []}
    code, run = 0, None
    stopping = False

    def interrupt(*_: object) -> None:
        nonlocal stopping
        if stopping:
            os._exit(130)
        stopping = True
        if run is not None:
            run.supervisor.stopping = True

    def notice(text: str) -> None:
        outcome["notices"].append(text)
        with (folder.logs / "notices").open("a") as file:
            file.write(f"{text}\n")

    signal.signal(signal.SIGINT, interrupt)
    try:
        bound = change(folder, order.get("settings", []))
        run = Run(folder, notify=notice, machine=machine(order, QuickForkServer), bound=bound)
        run.supervisor.stopping = stopping
        run.run()
        code = 0 if run.orchestrator.finished else 130
    except UserError as error:
        code, outcome["error"] = 2, str(error)
    except (RunError, IntegrityError) as error:
        code, outcome["error"] = 1, str(error)
    outcome |= {"code": code, "leaked": sorted(_leaked(before))}
    (folder.path / "outcome.json").write_text(json.dumps(outcome))
    return code


def _leaked(before: set[str]) -> set[str]:
    """Return the descriptors that the run left open.

    The relays of a faulty wire (see `faults`) close theirs shortly after the run, so this waits for them.
    """
    end = time.monotonic() + 60.0
    while (found := _descriptors() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _descriptors() -> set[str]:
    """Return the numbers and targets of all open descriptors."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {descriptor for descriptor in found if "/proc/" not in descriptor}


class Supervisor:
    """A supervisor that the host has forked, as the tests see it."""

    def __init__(self, pid: int, folder: RunDir) -> None:
        self.pid = pid
        self.folder = folder

    def alive(self) -> bool:
        return alive(self.pid)

    def signal(self, number: int, worker_id: str | None = None) -> bool:
        """Send a signal to the supervisor, or to the current process of a worker. Returns False if it is not alive."""
        pid = self.pid if worker_id is None else self.pids().get(worker_id)
        if pid is None or not alive(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def pids(self) -> dict[str, int]:
        """Return the most recent process id of each worker."""
        return dict(self._all())

    def everybody(self) -> set[int]:
        """Return the ids of all processes that the run has had so far."""
        return {self.pid} | {pid for _, pid in self._all()}

    def events(self) -> int:
        """Return the number of events in `events.jsonl`."""
        try:
            return self.folder.events.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def noticed(self, text: str) -> bool:
        """Whether this supervisor or an earlier one of the same run has shown the user a notice with this text."""
        notices = self.folder.logs / "notices"
        return notices.exists() and text in notices.read_text()

    def wait(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the supervisor ends, and return its outcome, which is empty if the supervisor was killed."""
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, f"the run does not end; see {self.folder.path}"
            time.sleep(0.01)
        file = self.folder.path / "outcome.json"
        outcome: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        file.unlink(missing_ok=True)
        return outcome

    def _all(self) -> list[tuple[str, int]]:
        try:
            lines = (self.folder.logs / "pids").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(line.split()[0], int(line.split()[1])) for line in lines if line.count(" ") == 1]


class Host:
    """The host process, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: RunDir, **faults: Any) -> Supervisor:
        """Start or resume a run. The order may have changed `settings`, and faults (see `faults.machine`)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder.path), **faults}) + "\n")
        self._process.stdin.flush()
        return Supervisor(int(self._process.stdout.readline()), folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE)
        self._process.stdout.close()


def alive(pid: int) -> bool:
    """Whether a process exists, running or stopped; a zombie does not count as alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    for name in (*_IMPORTS, "dora_rl.runtime.supervisor.run"):
        importlib.import_module(name)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            log = os.open(Path(order["folder"]) / "logs" / "output.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, null), (1, log), (2, log)):
                os.dup2(source, target)
            os.close(log)
            os.close(null)
            code = 70
            try:
                code = supervise(order)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
