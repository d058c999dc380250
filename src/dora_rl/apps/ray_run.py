"""A run on a Ray cluster, as the command sees it: the supervisor is an actor, whose messages are printed here.

The panel needs the supervisor's objects in this process, so a run on a cluster prints a line per step instead.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import ray
from rich.console import Console

from dora_rl.apps.progress_panel import ProgressPanel
from dora_rl.apps.train import INTERRUPTED, STOPPING
from dora_rl.core.errors import IntegrityError, RunError, UserError
from dora_rl.runtime.launch.ray.init import cluster, start_supervisor
from dora_rl.runtime.launch.ray.supervisor_actor import SupervisorActor
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.run import Run

_INTERVAL = 0.3
_ERRORS = {"user": UserError, "run": RunError, "integrity": IntegrityError, "bug": RunError}


def run_on_ray(folder: RunDir, console: Console, bound: int | None) -> bool:
    """Run until the end or an interrupt; False if it was interrupted."""
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with cluster(folder.read()):
        supervisor = start_supervisor(folder, bound, ReportingSupervisor)
        running = supervisor.go.remote()
        with _interrupts(supervisor, say):
            how, text = _follow(supervisor, running, say)
    if how in _ERRORS:
        raise _ERRORS[how](text)
    return bool(how == "finished")


class ReportingSupervisor(SupervisorActor):
    """A supervisor that reports a line per step."""

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Callable[[], None]]:
        with ProgressPanel(run, Console(file=_Lines(self.notify), width=200)) as watch:
            yield watch


class _Lines(io.StringIO):
    """A file that passes each complete line to a function."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take
        self._partial = ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)


def _follow(supervisor: Any, running: Any, say: Callable[[str], None]) -> tuple[str, str]:
    """Print the messages of the supervisor until the run ends; returns how it ended."""
    printed = 0
    try:
        while True:
            over = bool(ray.wait([running], timeout=_INTERVAL)[0])
            for text in ray.get(supervisor.notices.remote(printed)):
                printed += 1
                say(text)
            if over:
                how: tuple[str, str] = ray.get(running)
                return how
    except ray.exceptions.RayError as error:
        return "run", f"lost the supervisor: {str(error).splitlines()[0]}; resume the run"


@contextlib.contextmanager
def _interrupts(supervisor: Any, say: Callable[[str], None]) -> Iterator[None]:
    """The first interrupt stops the run, the second ends everything at once: the actors end with this process."""
    asked = False

    def interrupt(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        supervisor.stop.remote()
        say(STOPPING)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
