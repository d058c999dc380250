"""`dora-rl watch`: the panel of a run that another process runs, from the run's files.

Invariants:
- nothing is written and nothing is locked: the run does not notice;
- each line of the files is read once, and at most a twentieth of the time is spent on that, so that a run on the same
  machine keeps its speed.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from dora_rl.apps.log_state import LogObserver, LogState
from dora_rl.apps.panel import PanelValues, panel, step_line
from dora_rl.apps.run_reader import Window, is_running
from dora_rl.apps.summary import ACCURACY, RECENT, REWARD, progress, totals
from dora_rl.apps.tail import TailedFile
from dora_rl.core.commands import AnyCommand
from dora_rl.core.errors import UserError
from dora_rl.core.events import AnyEvent
from dora_rl.core.types import SECOND, Nanoseconds, StepId, Version
from dora_rl.orchestrator.modes import MODES
from dora_rl.runtime.run_dir import RunDir

_INTERVAL = 0.5
_PAUSE_FACTOR = 20
"""After reading and drawing for t seconds, the next time waits at least this many times t."""
_INTERRUPTED = 130


class _Line(msgspec.Struct):
    """A line of `events.jsonl`."""

    at: Nanoseconds
    event: AnyEvent
    commands: list[AnyCommand]


_EVENT = msgspec.json.Decoder(_Line)


def watch(run: Annotated[Path, typer.Argument(help="Folder of a run, running or not.")]) -> None:
    """Show the progress of a run that another process runs, until it ends; Ctrl-C leaves the run alone."""
    folder = RunDir.open(run)
    if not folder.events.exists() and not is_running(folder):
        raise UserError(f"the run {run} has not started: start it with `dora-rl train`")
    console = Console()
    try:
        watch_run(folder, console)
    except KeyboardInterrupt:
        _say(console, "left; the run is not affected" if is_running(folder) else "left")
        sys.exit(_INTERRUPTED)
    sentence, finished = ending(folder)
    _say(console, sentence)
    if not finished:
        sys.exit(1)


def watch_run(folder: RunDir, console: Console, pause: Callable[[float], None] = time.sleep) -> None:
    """Show a run until no process runs it."""
    watched = WatchedRun(folder)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    if live is not None:
        live.start()
    try:
        past = True
        while True:
            began = time.monotonic()
            running = is_running(folder)  # before the files are read: what comes last is not missed
            fresh = watched.update()
            for text in () if past else fresh.losses:
                _say(console, text)
            if live is not None:
                live.update(panel(watched.values()), refresh=True)
            else:
                for text in fresh.lines:
                    _say(console, text)
            if not running:
                break
            past = False
            pause(max(_INTERVAL, _PAUSE_FACTOR * (time.monotonic() - began)))
    finally:
        if live is not None:
            live.stop()
    if live is not None:
        console.print(panel(watched.values()))


def ending(folder: RunDir) -> tuple[str, bool]:
    """How a run ended that is not running, in one sentence, and whether it has finished."""
    found = progress(folder)
    done = f"{found.steps} of {found.steps_asked} steps" if found.steps_asked is not None else f"{found.steps} steps"
    if found.state == "finished":
        return f"the run has finished: {done}", True
    # A supervisor that ends by itself empties SQLite's write-ahead log.
    log = folder.ledger.with_name("ledger.db-wal")
    how = "was killed" if log.exists() and log.stat().st_size else "was stopped"
    return f"the run {how} after {done}; resume with: dora-rl train --resume {folder.path}", False


class Fresh(NamedTuple):
    """What was new in the files."""

    lines: list[str]
    """One line for each step."""
    losses: list[str]
    """One sentence for each process that was lost."""


class WatchedRun(LogObserver):
    """The values of the panel, from the files of a run."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._log = TailedFile(folder.events)
        self._metrics = TailedFile(folder.metrics)
        self._activity = TailedFile(folder.activity)
        self._state = LogState(folder.settings()["control"]["group_size"], self)
        self._rewards: dict[StepId, float] = {}
        self._accuracy: dict[Version, float] = {}
        self._last: dict[str, Any] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._time: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._past = True
        """Whether the files are yet to be read for the first time."""

    def update(self) -> Fresh:
        """Read what is new; the first time, of all steps so far only the last one has a line."""
        losses = list(self._read_activity())
        for line in self._log.lines():
            try:
                one = _EVENT.decode(line)
            except msgspec.DecodeError:
                continue  # a crash cut it short
            self._state.apply(one.event, one.commands, one.at)
        lines = [self._line() for _ in self._read_metrics() if not self._past]
        if self._past and self._last:
            lines.append(self._line())
        self._past = False
        return Fresh(lines, losses)

    def values(self) -> PanelValues:
        """What there is to show."""
        control, state = self._folder.settings()["control"], self._state
        bound = MODES[control["mode"]].staleness(control["max_staleness"]) if state.bound is None else state.bound
        return PanelValues(
            done=state.newest or 0,
            asked=control["steps"],
            seconds=state.at / SECOND,
            last=self._last,
            rewards=list(self._rewards.values()),
            accuracy=sorted(self._accuracy.items()),
            recent=self._recent,
            time=self._time,
            staleness=self._staleness,
            running=state.running,
            waiting=state.waiting,
            trainer=state.trainer,
            bound=bound if control["max_staleness"] == "auto" else None,
        )

    def step_applied(self, step: StepId, staleness: Sequence[int], at: Nanoseconds) -> None:  # noqa: ARG002
        self._staleness.update(staleness)

    def _line(self) -> str:
        values = self.values()
        values.done = self._last["version"]
        return step_line(values)

    def _read_metrics(self) -> Iterator[StepId]:
        """Read the new metrics, step by step."""
        for record in self._metrics.records():
            if "evaluation" in record:
                self._accuracy[record["evaluation"]] = record[ACCURACY]
            elif "step" in record:
                self._last = record
                self._rewards[record["step"]] = record[REWARD]
                self._recent.append((record["batch/response_tokens"], record["timing_s/step"]))
                yield record["step"]

    def _read_activity(self) -> Iterator[str]:
        """Read the new activity; yields a sentence for each process that was lost."""
        for record in self._activity.records():
            if "shares" in record:
                window = Window(record["who"], record["start"], record["end"], record["shares"])
                self._time += totals([window])[0]
            elif record.get("note") == "lost":
                yield f"{record['who']} is lost: {record['reason']}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
