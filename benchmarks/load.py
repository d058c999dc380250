"""Step times of `sync` and `dora` with busy processes beside them, against what a fair share of the cores would give.

    python -m benchmarks.load [--steps 4] [--repeats 2] [--loops 0,2,4]

A busy process is a loop that only computes, at the default niceness and in a separate session, like another user's
program. In each run the loops are continued and stopped in turn, each time after the same number of whole steps, so
that all loads are measured in the same run; the order changes with each repeat. The policy does not learn here, so that
the lengths of its responses stay the same.

The fair slowdown is measured too, by a reference program that runs beside the same loops: it computes with as many
processes as there are cores, none of which ever waits for another. A run is slowed down fairly if its steps slow down
by the same factor as that program. Threads that wait for each other can lose far more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import ROOT, describe
from benchmarks.report import Target, at_most, publish
from benchmarks.running import command_of
from dora_rl.core.cpu_cores import usable_cores

JOB = ROOT / "examples" / "quickstart" / "quickstart.toml"
SETTINGS: dict[str, object] = {
    "control.steps": 100_000,
    "control.groups_per_step": 8,
    "evaluation.every": 0,
    "checkpoint.every": 100_000,
    "trainer.optimiser.learning_rate": 1e-12,
}
MODES = ("sync", "dora")
AIM = 1.3
"""Highest slowdown, as a multiple of the fair one."""
SPREAD = 1.5
"""Highest ratio between the slowest and the fastest run of one mode without loops."""
_WARM = 3
"""Steps before the first that counts, in which the thread pools and the pipeline fill."""
_LONGEST = 120.0
"""Time limit in seconds for the steps of one load; a load without a whole step in that time misses its aim."""
_PLAIN = 1.5
"""Seconds for which the reference program is measured at each load."""
_LOOP = "while True: pass"
_COUNT = """
import os, sys, time
cores, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
ends = []
for _ in range(cores):
    reading, writing = os.pipe()
    if os.fork() == 0:
        count = 0
        while time.monotonic() < end:
            for _ in range(1000): pass
            count += 1
        os.write(writing, str(count).encode())
        os._exit(0)
    os.close(writing)
    ends.append(reading)
print(sum(int(os.read(reading, 99)) for reading in ends))
"""
_console = Console(width=120)
Times = dict[int, list[float]]
"""Seconds by the number of loops."""


class Loops:
    """Busy processes; all of them are stopped at first."""

    def __init__(self, most: int) -> None:
        command = [sys.executable, "-c", _LOOP]
        self._all = [subprocess.Popen(command, start_new_session=True) for _ in range(most)]
        self.run(0)

    def run(self, count: int) -> None:
        """Let this many of them run and stop the others."""
        for index, process in enumerate(self._all):
            process.send_signal(signal.SIGCONT if index < count else signal.SIGSTOP)

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4, help="whole steps at each load")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--loops", default="0,2,4")
    given = parser.parse_args()
    loads = [int(count) for count in given.loops.split(",")]
    assert loads[0] == 0, "the first load must be 0: the others are compared with it"
    begin = time.monotonic()
    loops = Loops(max(loads))
    fair: Times = defaultdict(list)
    runs: dict[str, list[Times]] = {mode: [] for mode in MODES}
    try:
        for repeat in range(given.repeats):
            turned = repeat % len(loads)
            order = loads[turned:] + loads[:turned]
            for count in order:
                loops.run(count)
                fair[count].append(1 / _plain())
            for mode in MODES if repeat % 2 == 0 else MODES[::-1]:
                loops.run(0)
                runs[mode].append(_steps(mode, order, given.steps, loops))
                medians = ", ".join(f"{count} loops {_median_text(runs[mode][-1].get(count, []))}" for count in loads)
                _console.print(
                    f"{repeat + 1}/{given.repeats} {mode}: {medians} ({time.monotonic() - begin:.0f} s so far)"
                )
    finally:
        loops.end()
    targets = _show(loads, runs, {count: statistics.median(values) for count, values in fair.items()})
    figures = {
        "machine": describe(),
        "seconds": round(time.monotonic() - begin),
        "steps": given.steps,
        "plain program, seconds a unit": fair,
        "step seconds": runs,
    }
    publish("load", targets, figures)


def _plain() -> float:
    """Work per second of the reference program."""
    command = [sys.executable, "-c", _COUNT, str(usable_cores()), str(_PLAIN)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    return float(done.stdout) / _PLAIN


def _steps(mode: str, order: list[int], steps: int, loops: Loops) -> Times:
    """Seconds of each step of a run, by the number of loops beside it."""
    found: Times = {}
    with _running(mode) as (run, metrics):
        lines = _follow(metrics, run)
        for _ in range(_WARM):
            next(lines)
        for count in order:
            loops.run(count)
            end = time.monotonic() + _LONGEST
            before = next(lines)  # this step began under another load
            found[count] = []
            while len(found[count]) < steps and time.monotonic() < end:
                at = next(lines)
                found[count].append(at - before)
                before = at
        loops.run(0)
    return found


@contextlib.contextmanager
def _running(mode: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run that is killed when the context ends, and its metrics file."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+b") as output:
        command = command_of(JOB, Path(folder), **SETTINGS, **{"control.mode": mode})
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield process, Path(folder) / "run" / "metrics.jsonl"
            assert process.poll() is None, "the run ended before it was measured"
        except BaseException:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-2000:])
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its workers end with it
            process.wait()


def _follow(metrics: Path, run: subprocess.Popen[bytes]) -> Iterator[float]:
    """Yield the time of each step by the run's clock when the step ends."""
    while not metrics.exists():
        _wait(run)
    with metrics.open() as file:
        line = ""
        while True:
            line += file.readline()
            if not line.endswith("\n"):
                _wait(run)
                continue
            record = json.loads(line)
            line = ""
            if "step" in record:
                yield record["time"]


def _wait(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is not None:
        raise RuntimeError(f"the run ended with exit code {run.returncode}")
    time.sleep(0.01)


def _median_text(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s" if seconds else "none"


def _show(loads: list[int], runs: dict[str, list[Times]], fair: dict[int, float]) -> list[Target]:
    """Print the table and return the targets."""
    table = Table(title="medians of steps; slowdown against no loops")
    for column in ("loops", "fair slowdown", *(f"{mode} {what}" for mode in MODES for what in ("step s", "slowdown"))):
        table.add_column(column, justify="right")
    targets = []
    for count in loads:
        row = [str(count), f"{fair[count] / fair[0]:.2f}"]
        for mode in MODES:
            slowdown = statistics.median(_median(run, count) / _median(run, 0) for run in runs[mode])
            row += [f"{statistics.median(_median(run, count) for run in runs[mode]):.2f}", f"{slowdown:.2f}"]
            if count:
                name = f"{mode}, {count} loops: slowdown over the fair one"
                targets.append(at_most(name, AIM, slowdown / (fair[count] / fair[0])))
        table.add_row(*row)
    _console.print(table)
    for mode in MODES:
        alone = [_median(run, 0) for run in runs[mode]]
        targets.append(at_most(f"{mode}, no loops: slowest run over fastest", SPREAD, max(alone) / min(alone)))
    return targets


def _median(run: Times, count: int) -> float:
    return statistics.median(run[count]) if run.get(count) else _LONGEST


if __name__ == "__main__":
    main()
