"""One command that compares the package with its alternatives, part by part.

    python -m benchmarks.bench [--quick] [--only training,tails,...]
    python -m benchmarks.bench --compare OLD NEW     # two folders of results: which ratios changed

Every part runs in a separate process with a time limit; if one fails, the failure is reported and the others continue.
Raw figures go to `results/`, and `benchmarks.page` writes `docs/benchmarks.md` from them alone. Long parts are skipped
if their results are from the day of the last commit, and always in a quick run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from benchmarks import page, progress
from benchmarks.compare import compare
from benchmarks.machine import IDLE, describe, git
from benchmarks.report import RESULTS

ROOT = Path(__file__).parent.parent
console = Console()
SETTLE = 150.0
"""Seconds in which the load average of one minute falls by nine tenths."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the benchmark."""

    name: str
    """Name of its module and of its results file."""
    seconds: tuple[float, float]
    """Expected seconds on two cores, quick and full, for the estimate of the time left."""
    kept: bool = False
    """Whether results from the day of the last commit are kept; such a part never runs in a quick run."""

    def limit(self, *, quick: bool) -> float:
        """Seconds after which the part is stopped."""
        return 300 + 6 * self.seconds[not quick]


PARTS = (
    Part(name="training", seconds=(180, 1350)),
    Part(name="tails", seconds=(150, 800)),
    Part(name="reality", seconds=(60, 60)),
    Part(name="scale", seconds=(60, 120)),
    Part(name="llama", seconds=(40, 120)),
    Part(name="trl_async", seconds=(40, 60)),
    Part(name="engine", seconds=(0, 1200), kept=True),
    Part(name="trainer", seconds=(0, 420), kept=True),
    Part(name="control", seconds=(0, 240), kept=True),
    Part(name="paper_table", seconds=(0, 240), kept=True),
)
Status = Literal["ok", "kept", "failed", "not run"]


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a part."""

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    when: str = ""
    commit: str = ""
    """Commit of the measured code, or of the results if they are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats: under ten minutes on two cores")
    parser.add_argument("--only", default="", help="run these parts only; the others keep their results")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="folders of results")
    for peer in ("trl", "vllm", "llama"):
        parser.add_argument(f"--{peer}", type=Path, help=f"a Python that has {peer}; .venv-{peer} by default")
    given = parser.parse_args()
    if given.compare:
        sys.exit(min(1, compare(*given.compare)))
    for peer in ("trl", "vllm", "llama"):
        if getattr(given, peer):
            os.environ[f"{peer.upper()}_PYTHON"] = str(getattr(given, peer).absolute())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part is ended too
    chosen = [part for part in PARTS if not given.only or part.name in given.only.split(",")]
    run(chosen, quick=given.quick, everything=not given.only)


def run(parts: list[Part], *, quick: bool, everything: bool) -> None:
    """Run the parts one after the other and write the page."""
    RESULTS.mkdir(exist_ok=True)
    known = {} if everything else _known()
    about = describe() | {"load at the start": _settled(), "quick": quick, "started": _now()}
    about["only"] = [] if everything else [part.name for part in parts]
    outcomes = {name: Outcome(**one) for name, one in known.items()}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console) as bars:
        whole = bars.add_task("bench", total=1.0, note="")
        left = Left(parts, quick=quick)
        for part in parts:
            when = _now()
            outcome = _one(part, bars, whole, left, quick=quick)
            if outcome.status != "kept":
                outcome = replace(outcome, when=when, commit=about["commit"])
            outcomes[part.name] = outcome
            left.done(part)
            _write(about | {"seconds": left.spent}, outcomes)
            colour = {"ok": "green", "kept": "green", "failed": "red", "not run": "yellow"}[outcome.status]
            bars.console.print(
                f"[{colour}]{outcome.status:8}[/] {part.name:12} {outcome.seconds:5.0f} s  {outcome.reason[:150]}",
                highlight=False,
            )
    page.write()
    console.print(f"written: docs/benchmarks.md, {RESULTS.relative_to(ROOT)}/", highlight=False)


def _settled() -> float:
    """Wait until the load of earlier work has decayed and return the load; other programs are not waited for."""
    end = time.monotonic() + SETTLE
    while (load := os.getloadavg()[0]) > IDLE and time.monotonic() < end:
        console.print(f"waiting for the machine to be idle: its load is {load:.1f}", highlight=False)
        time.sleep(15)
    return load


class Left:
    """Estimates the seconds left: for the current part by its progress, for the others by their expected time."""

    def __init__(self, parts: list[Part], *, quick: bool) -> None:
        self._expected = {part.name: 0.0 if _keeps(part, quick=quick) else part.seconds[not quick] for part in parts}
        self._begin = self._part = time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begin

    def done(self, part: Part) -> None:
        del self._expected[part.name]
        self._part = time.monotonic()

    def seconds(self, part: Part, done: int, total: int) -> float:
        took = time.monotonic() - self._part
        here = took * (total - done) / done if done else max(0.0, self._expected[part.name] - took)
        return here + sum(seconds for name, seconds in self._expected.items() if name != part.name)


def _one(part: Part, bars: Progress, whole: TaskID, left: Left, *, quick: bool) -> Outcome:
    if _keeps(part, quick=quick):
        return _kept(part)
    begin = time.monotonic()
    bar = bars.add_task(part.name, total=1.0, note="starting")

    def show(line: str) -> None:
        found = progress.parse(line)
        if found is None:
            return
        seconds = left.seconds(part, found.done, found.total)
        bars.update(bar, completed=found.done / max(1, found.total), note=found.text)
        spent = left.spent
        bars.update(whole, completed=spent / max(1.0, spent + seconds), note=f"about {_minutes(seconds)} left")
        if not bars.console.is_terminal:
            bars.console.print(f"{part.name}: {found.text} (about {_minutes(seconds)} left)", highlight=False)

    path = RESULTS / f"{part.name}.json"
    before = path.stat().st_mtime_ns if path.exists() else None
    reason = _run_module(part, show, quick=quick)
    bars.remove_task(bar)
    seconds = time.monotonic() - begin
    if not reason and (not path.exists() or path.stat().st_mtime_ns == before):
        reason = "it wrote no results"
    if reason:
        return Outcome(name=part.name, status="failed", seconds=seconds, reason=reason)
    why = json.loads(path.read_text()).get("not run", "")
    return Outcome(name=part.name, status="not run" if why else "ok", seconds=seconds, reason=why)


def _run_module(part: Part, show: Any, *, quick: bool) -> str:
    """Run the module of a part; returns the reason of a failure, or an empty string."""
    command = [sys.executable, "-m", f"benchmarks.{part.name}", *(["--quick"] if quick and not part.kept else [])]
    log = RESULTS / "logs" / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, start_new_session=True
        ) as process,
    ):
        over = threading.Event()

        def give_up() -> None:
            over.set()
            _end(process)

        late = threading.Timer(part.limit(quick=quick), give_up)
        late.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                show(line)
            process.wait()
        finally:
            late.cancel()
            _end(process)
    if over.is_set():
        return f"not done after {part.limit(quick=quick):.0f} s"
    return f"it ended with exit code {process.returncode}: {_last_line(log)}" if process.returncode else ""


def _end(process: subprocess.Popen[str]) -> None:
    """End a part and the processes that it started; the workers of a run end with their supervisor."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        time.sleep(1 if number == signal.SIGTERM else 0)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


# -- results that are kept --------------------------------------------------------------------------------------


def _keeps(part: Part, *, quick: bool) -> bool:
    return part.kept and (quick or _day_of(part) == git("log", "-1", "--format=%cs"))


def _kept(part: Part) -> Outcome:
    day = _day_of(part)
    if day is None:
        command = f"make bench-{part.name}".replace("bench-paper_table", "paper-table")
        return Outcome(
            name=part.name, status="not run", reason=f"it takes long and runs only by its own command: {command}"
        )
    commit = git("log", "-1", "--format=%h", "--", str(RESULTS / f"{part.name}.json"))
    return Outcome(name=part.name, status="kept", reason=f"measured on {day}", when=day, commit=commit)


def _day_of(part: Part) -> str | None:
    """The day of the results: that of their commit, or of the file if it has changed since."""
    path = RESULTS / f"{part.name}.json"
    if not path.exists():
        return None
    if git("status", "--porcelain", "--", str(path)):
        return dt.datetime.fromtimestamp(path.stat().st_mtime, dt.UTC).strftime("%Y-%m-%d")
    return git("log", "-1", "--format=%cs", "--", str(path)) or None


def _known() -> dict[str, dict[str, Any]]:
    path = RESULTS / "bench.json"
    return {one["name"]: one for one in json.loads(path.read_text())["parts"]} if path.exists() else {}


def _write(about: dict[str, Any], outcomes: dict[str, Outcome]) -> None:
    content = about | {"parts": [asdict(one) for one in outcomes.values()]}
    (RESULTS / "bench.json").write_text(json.dumps(content, indent=2) + "\n")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


if __name__ == "__main__":
    main()
