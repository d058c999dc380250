"""A run on a Ray cluster, from the command's side: its supervisor is an actor; what it says is printed here.

The live panel needs the supervisor's own figures at hand, so a run on a cluster says a line a step.
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
from dora_rl.core.errors import IntegrityError, RunError, UserError
from dora_rl.runtime.launch.ray.init import cluster, start_supervisor
from dora_rl.runtime.launch.ray.supervisor_actor import SupervisorActor
from dora_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.run import Run

_INTERVAL = 0.3
_INTERRUPTED = 130
_ERRORS = {"user": UserError, "run": RunError, "integrity": IntegrityError, "bug": RunError}


def go_on_ray(folder: RunDir, console: Console, bound: int | None) -> bool:
    """Carry a run to its end, or to an interrupt; False if it was interrupted."""
    say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with cluster(folder.read()):
        head = start_supervisor(folder, bound, LiveHead)
        going = head.go.remote()
        with _interrupts(head, say):
            how, text = _follow(head, going, say)
    if how in _ERRORS:
        raise _ERRORS[how](text)
    return bool(how == "finished")


class LiveHead(SupervisorActor):
    """A supervisor that says a line a step."""

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Callable[[], None]]:
        with ProgressPanel(run, Console(file=_Lines(self.notify), width=200)) as watch:
            yield watch


class _Lines(io.StringIO):
    """A file that hands over each line."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__()
        self._take = take
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)


def _follow(head: Any, going: Any, say: Callable[[str], None]) -> tuple[str, str]:
    """Print what the supervisor says, until it is through; how it ended."""
    known = 0
    try:
        while True:
            over = bool(ray.wait([going], timeout=_INTERVAL)[0])
            for text in ray.get(head.notices.remote(known)):
                known += 1
                say(text)
            if over:
                how: tuple[str, str] = ray.get(going)
                return how
    except ray.exceptions.RayError as error:
        return "run", f"the supervisor is lost: {str(error).splitlines()[0]}; resume the run"


@contextlib.contextmanager
def _interrupts(head: Any, say: Callable[[str], None]) -> Iterator[None]:
    """The first interrupt stops the run, the second ends all at once: the actors end with this process."""
    asked = False

    def interrupt(*_: object) -> None:
        nonlocal asked
        if asked:
            os._exit(_INTERRUPTED)
        asked = True
        head.stop.remote()
        say("stopping; everything finished is kept. Once more to stop at once.")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
