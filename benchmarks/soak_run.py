"""A run at full load with a fault every minute, then without faults. Does memory stay flat? Is anything left behind?

`python -m benchmarks.soak_run --minutes 60 --quiet 10`. While faults are injected, the memory of all processes together
is measured. The memory of each process is measured in the quiet period afterwards, in which no process is restarted: a
process that is killed every few minutes is always warming up. The first two minutes of either period are left out (a
fifth, if the period is short), because pools, caches and the KV cache are touched for the first time then.

- Memory means anonymous memory: a process's own pages, and pages that it shares with the fork server until it writes to
  them. Mapped weights and shared memory are files that all processes share; the number of segments is recorded.
- The KV cache of an instance is counted separately: it is as large as `kv_bytes` and fills up as its pages are first
  touched. It is recognised by its advice to use huge pages, which nothing else in the package gives.
- The minimum of each half minute counts, for memory and for descriptors: a leak never goes away, whereas the working
  memory of a step and a file that is being written do. Segments are not counted as descriptors, because an engine keeps
  a few for reuse.
- Growth is a least-squares slope. It counts after subtracting two standard errors, as megabytes per hour, as a share of
  the process's memory, and as bytes per step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from tests.runtime.checks import leftovers
from tests.runtime.host import Host, alive
from tests.runtime.making import make_base, make_model, make_run, merged, settings

from benchmarks.report import at_most, publish
from dora_rl.apps.audit import audited
from dora_rl.engine.kv_transfer.shared_memory import PREFIX as SEGMENT

_EVERY = 5.0
_WINDOW = 6
"""Number of samples in a window, of which the minimum counts."""
_WARM = 120.0
_HOUR = 3600.0
FAULTS = ("kill i0", "kill trainer", "stop i1", "kill reward0", "kill supervisor", "kill i1", "kill fork_server")


class Sample(NamedTuple):
    """One process at one moment."""

    at: float
    pid: int
    """Process id: a restarted process has another one."""
    megabytes: float
    kv_megabytes: float
    descriptors: int


class Slope(NamedTuple):
    """Growth per hour and its standard error."""

    each_hour: float
    error: float

    @property
    def sure(self) -> float:
        """The growth that remains after subtracting two standard errors."""
        return max(0.0, self.each_hour - 2 * self.error)


def by_process(samples: list[Sample], since: float) -> list[list[Sample]]:
    """The samples of each process since a moment."""
    processes: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.at >= since:
            processes[sample.pid].append(sample)
    return list(processes.values())


def curve(samples: list[Sample], value: Callable[[Sample], float]) -> list[tuple[float, float]]:
    """The minimum of each window."""
    return minima([(sample.at, value(sample)) for sample in samples], _WINDOW)


def minima(points: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """The minimum of each window of `size` points."""
    windows = [points[start : start + size] for start in range(0, len(points) - size + 1, size)]
    return [(window[0][0], min(value for _, value in window)) for window in windows]


def slope(curves: list[list[tuple[float, float]]]) -> Slope:
    """Least-squares slope within each process, pooled over the processes of one role."""
    count = 0
    centred: list[tuple[float, float]] = []
    for points in curves:
        if len(points) < 3:
            continue
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        centred += [(x - mean_x, y - mean_y) for x, y in points]
        count += len(points) - 1
    along = sum(x * x for x, _ in centred)
    across = sum(x * y for x, y in centred)
    if not along or count < 2:
        return Slope(0.0, math.inf)
    steep = across / along
    rest = sum((y - steep * x) ** 2 for x, y in centred)
    return Slope(steep * _HOUR, math.sqrt(rest / (count - 1) / along) * _HOUR)


def measure(pid: int, at: float) -> Sample | None:
    """Sample a process; None if it has ended."""
    try:
        mappings = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
        descriptors = sum(not _of_a_segment(one) for one in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    own = kv = 0
    for mapping, after in itertools.pairwise(mappings):
        found = re.search(r"^Anonymous: +(\d+)", mapping, re.MULTILINE)
        kilobytes = int(found[1]) if found else 0
        if "hg" in after.partition("\n")[0].split():
            kv += kilobytes
        else:
            own += kilobytes
    return Sample(at, pid, own / 1024, kv / 1024, descriptors) if own else None


def _of_a_segment(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):  # the descriptor was closed in the meantime
        return descriptor.readlink().name.startswith(SEGMENT)
    return True


class Soak:
    """The run and the faults that are injected into it."""

    def __init__(self, minutes: float, quiet: float) -> None:
        self.base = make_base(Path(tempfile.mkdtemp(prefix="dora-rl-soak-")))
        make_model(self.base / "model", layers=4, hidden=128)
        self.host = Host()
        self.folder = make_run(self.base, "soak", self._settings())
        self.supervisor = self.host.start(self.folder)
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.segments: list[int] = []
        self.injected: dict[str, int] = defaultdict(int)
        self.quiet = minutes * 60
        """Seconds after which no more faults are injected."""
        self.seconds = self.quiet + quiet * 60
        self.steps: list[tuple[float, int]] = []
        self.ended: list[dict[str, Any]] = []
        self.crashed: list[dict[str, Any]] = []
        """Reports of supervisors that ended without a fault: such a run stands still until a user resumes it."""

    def _settings(self) -> dict[str, Any]:
        return merged(
            settings(self.base, groups_per_step=8, group_size=8, steps=1_000_000, max_response_tokens=160),
            {
                "rollout": {
                    "engine": {"max_requests": 64, "kv_bytes": 1 << 26, "host_bytes": 1 << 26, "max_context": 200},
                    "heartbeat_seconds": 0.5,
                },
                "control": {"deadlines": {"heartbeat": 10.0, "train": 60.0, "load": 60.0, "move": 20.0}},
                "threads": 0,
            },
        )

    @property
    def warm(self) -> float:
        """Seconds after which the growth of each process is measured."""
        return self.quiet + min(_WARM, (self.seconds - self.quiet) / 5)

    def together(self) -> list[tuple[float, float]]:
        """Megabytes of all processes while faults are injected: the minimum of each minute."""
        total: dict[float, float] = defaultdict(float)
        for sample in itertools.chain.from_iterable(self.samples.values()):
            if min(_WARM, self.quiet / 5) <= sample.at < self.quiet:
                total[sample.at] += sample.megabytes
        return minima(sorted(total.items()), 2 * _WINDOW)

    def steps_each_hour(self) -> float:
        """Steps per hour while growth is measured."""
        (begin, first), (end, last) = next(one for one in self.steps if one[0] >= self.warm), self.steps[-1]
        return (last - first) / max(1.0, end - begin) * _HOUR

    def run(self) -> None:
        """Sample and inject faults until the time is over."""
        begin = time.monotonic()
        faults = itertools.cycle(FAULTS)
        next_fault = begin + 60
        while (now := time.monotonic()) < begin + self.seconds:
            self._sample(now - begin)
            if not self.supervisor.alive():
                self.crashed.append(self.supervisor.wait())
                self.supervisor = self.host.start(self.folder)
            if now >= next_fault and now < begin + self.quiet:
                next_fault += 60
                self._inject(next(faults))
            time.sleep(max(0.0, _EVERY - (time.monotonic() - now)))
        self.supervisor.signal(signal.SIGINT)
        self.ended.append(self.supervisor.wait(240))

    def _sample(self, at: float) -> None:
        workers = {**self.supervisor.pids(), "supervisor": self.supervisor.pid}
        for worker, pid in workers.items():
            if alive(pid) and (sample := measure(pid, at)) is not None:
                self.samples["instance" if worker[0] == "i" else worker].append(sample)
        self.steps.append((at, self.folder.metrics.read_bytes().count(b"\n") if self.folder.metrics.exists() else 0))
        self.segments.append(len(list(Path("/dev/shm").glob("dora-rl-kv-*"))))

    def _inject(self, fault: str) -> None:
        action, worker = fault.split()
        number = signal.SIGSTOP if action == "stop" else signal.SIGKILL
        if worker != "supervisor":
            self.injected[fault] += self.supervisor.signal(number, worker)
            return
        self.supervisor.signal(number)
        self.supervisor.wait(240)
        self.supervisor = self.host.start(self.folder)
        self.injected[fault] += 1

    def close(self) -> None:
        self.host.close()
        shutil.rmtree(self.base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--quiet", type=float, default=10.0, help="minutes without faults after that")
    arguments = parser.parse_args()
    soak = Soak(arguments.minutes, arguments.quiet)
    soak.run()
    audit = audited(soak.folder)
    problems = audit.problems
    left = leftovers(soak.supervisor, soak.ended[-1])
    table = Table(
        "process", "starts", "anonymous, MB", "growth per hour, MB", "bytes per step", "descriptors", "growth"
    )
    figures: dict[str, Any] = {
        "minutes": arguments.minutes,
        "quiet_minutes": arguments.quiet,
        "faults": dict(soak.injected),
        "processes": {},
    }
    worst_memory = worst_descriptors = 0.0
    steps = soak.steps_each_hour()
    for role, samples in sorted(soak.samples.items()):
        quiet = by_process(samples, soak.warm)
        level = [sample.megabytes for process in quiet for sample in process]
        if not level:
            continue  # no process of this role ran in the quiet period
        curves = [curve(process, lambda sample: sample.megabytes) for process in quiet]
        memory = slope(curves)
        descriptors = slope([curve(process, lambda sample: sample.descriptors) for process in quiet])
        mean = sum(level) / len(level)
        worst_memory = max(worst_memory, memory.sure / mean)
        worst_descriptors = max(worst_descriptors, descriptors.sure)
        figures["processes"][role] = {
            "starts": len({sample.pid for sample in samples}),
            "megabytes": round(mean, 1),
            "most_megabytes": round(max(sample.megabytes for sample in samples), 1),
            "kv_megabytes": round(max(sample.kv_megabytes for sample in samples), 1),
            "megabytes_each_hour": _finite(memory),
            "bytes_each_step": round(memory.each_hour * (1 << 20) / max(1.0, steps)),
            "descriptors": max(sample.descriptors for sample in samples),
            "descriptors_each_hour": _finite(descriptors),
            "curves": [[[round(at), round(megabytes, 2)] for at, megabytes in one] for one in curves],
        }
        shown = figures["processes"][role]
        table.add_row(
            role,
            str(shown["starts"]),
            f"{mean:.0f}",
            f"{memory.each_hour:.1f} +- {memory.error:.1f}",
            f"{shown['bytes_each_step']:,}",
            str(shown["descriptors"]),
            f"{descriptors.each_hour:.1f} +- {descriptors.error:.1f}",
        )
    Console().print(table)
    whole = soak.together()
    growth, usual = slope([whole]), sum(megabytes for _, megabytes in whole) / max(1, len(whole))
    figures |= {
        "together": {"megabytes": round(usual, 1), "megabytes_each_hour": _finite(growth), "curve": whole},
        "most_segments": max(soak.segments),
        "steps_each_hour": round(steps),
        "crashed": soak.crashed,
        "left_behind": left,
        "audit": problems,
        "steps": audit.steps,
        "ledger_share": next(figure.value for figure in audit.figures if figure.name.startswith("ledger")),
    }
    targets = [
        at_most(
            "under faults: growth of all memory per hour, share, less two errors", 0.05, growth.sure / max(1.0, usual)
        ),
        at_most("without faults: growth of a process's memory per hour, share, less two errors", 0.05, worst_memory),
        at_most("without faults: growth of open descriptors per hour, less two errors", 1.0, worst_descriptors),
        at_most("left behind: processes, segments, descriptors, half-written files", 0, len(left)),
        at_most("supervisors that ended without a fault", 0, len(soak.crashed)),
        at_most("broken promises, by the audit", 0, len(problems)),
        at_most("share of the run's time spent on the ledger", 0.02, float(figures["ledger_share"].rstrip("%")) / 100),
    ]
    publish("soak_run", targets, figures)
    with contextlib.suppress(OSError):
        soak.close()
    sys.exit(0 if all(target.met for target in targets) else 1)


def _finite(found: Slope) -> Any:
    return json.loads(json.dumps([round(part, 2) if math.isfinite(part) else None for part in found]))


if __name__ == "__main__":
    main()
