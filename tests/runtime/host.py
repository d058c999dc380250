"""A process that has everything imported and forks supervisors, so that a run begins in a fraction of a second.

The supervisors run the real thing in processes of their own, to be killed, stopped and interrupted; their nursery is
forked too, until it is killed. `python -m tests.runtime.host` reads one order a line and answers with a process id.
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
    """A child, as `subprocess.Popen` would have it."""

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
    """A nursery without the seconds of importing; says whom it has forked."""

    timeout = PATIENCE  # the first is forked at once, one that replaces it must import everything

    def fork(self, link: socket.socket, log: IO[bytes]) -> forks.Forked:
        forked = super().fork(link, log)
        self._note(f"reaper-{Path(log.name).stem}", forked.reaper)
        self._note(Path(log.name).stem, forked.pid)
        return forked

    def _start(self) -> tuple[socket.socket, int]:
        begun = super()._start() if hasattr(self, "_process") else self._fork_server()
        self._note("fork_server", begun[1])
        return begun

    def _fork_server(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        ours.settimeout(self.timeout)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            # As `exec` would have it: nothing of the supervisor is open here, least of all its lock.
            kept = theirs.fileno()
            os.closerange(3, kept)
            os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
            os.setsid()
            serve(theirs, parent)
            os._exit(0)
        theirs.close()
        self._process: Any = Forked(pid)
        return ours, pid

    def _note(self, place: str, pid: int) -> None:
        with (self._log.parent / "pids").open("a") as file:
            file.write(f"{place} {pid}\n")


def supervise(order: dict[str, Any]) -> int:
    """Carry a run as far as it goes; the exit code as `dora-rl train` has it."""
    from dora_rl.core.errors import IntegrityError, RunError, UserError
    from dora_rl.runtime.resume import change
    from dora_rl.runtime.supervisor.run import Run
    from tests.runtime.faults import machine

    folder = RunDir(Path(order["folder"]))
    before = _descriptors()
    said: dict[str, Any] = {"notices": []}
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
        said["notices"].append(text)
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
        code, said["error"] = 2, str(error)
    except (RunError, IntegrityError) as error:
        code, said["error"] = 1, str(error)
    said |= {"code": code, "leaked": sorted(_leaked(before))}
    (folder.path / "outcome.json").write_text(json.dumps(said))
    return code


def _leaked(before: set[str]) -> set[str]:
    """What stays open. The relays of a faulty wire (see `faults`) close their ends a moment after the run has."""
    end = time.monotonic() + 60.0
    while (found := _descriptors() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _descriptors() -> set[str]:
    """What is open, as names."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {one for one in found if "/proc/" not in one}


class Supervisor:
    """A supervisor that was forked."""

    def __init__(self, pid: int, folder: RunDir) -> None:
        self.pid = pid
        self.folder = folder

    def alive(self) -> bool:
        return alive(self.pid)

    def signal(self, number: int, place: str | None = None) -> bool:
        """To the supervisor, or to the process that fills a place now; False if there is none."""
        pid = self.pid if place is None else self.pids().get(place)
        if pid is None or not alive(pid):
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def pids(self) -> dict[str, int]:
        """The last process of each place."""
        return dict(self._all())

    def everybody(self) -> set[int]:
        """All processes that there ever were."""
        return {self.pid} | {pid for _, pid in self._all()}

    def events(self) -> int:
        """How many events are in the log for people."""
        try:
            return self.folder.events.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def noticed(self, text: str) -> bool:
        """It has said so, in this life or one before."""
        notices = self.folder.logs / "notices"
        return notices.exists() and text in notices.read_text()

    def wait(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """What it said when it ended; without `code` if it was killed."""
        end = time.monotonic() + seconds
        while self.alive():
            assert time.monotonic() < end, f"the run does not end; see {self.folder.path}"
            time.sleep(0.01)
        outcome = self.folder.path / "outcome.json"
        said: dict[str, Any] = json.loads(outcome.read_text()) if outcome.exists() else {}
        outcome.unlink(missing_ok=True)
        return said

    def _all(self) -> list[tuple[str, int]]:
        try:
            lines = (self.folder.logs / "pids").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(line.split()[0], int(line.split()[1])) for line in lines if line.count(" ") == 1]


class Host:
    """The tests' end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: RunDir, **faults: Any) -> Supervisor:
        """Begin a run, or go on with it."""
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
    """A process that runs, or is stopped; one that has ended and was not buried yet does not count."""
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
