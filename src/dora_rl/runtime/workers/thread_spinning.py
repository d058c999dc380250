"""Whether the OpenMP threads of a process spin or sleep while they wait for each other.

On free cores, spinning is right: a step of a small model has hundreds of short parallel regions, and waking a thread
for each of them costs as much as a second core gains. On cores that other processes want too, it is wrong: a thread
that spins has used up its time slice by the time the thread that it waits for gets a core, so each region takes a whole
time slice.

libgomp reads its spin count when it is loaded, and has no call to change it. But it does not spin at all while it
manages more threads than there are cores (`OMP_WAIT_POLICY=PASSIVE`). So an extra thread with its own pool, which only
sleeps, makes all other threads sleep while they wait; when it ends they spin again. Results do not change, since the
number of threads that compute stays the same.

Invariants:
- contention is measured only while the threads spin, so the measurements are comparable;
- the threads spin again after a pause, to see whether the other processes are gone; the pause doubles each time that
  they are not;
- where something is missing (another OpenMP, no scheduler statistics), threads wait as their environment says.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from dora_rl.core.cpu_cores import usable_cores

_EVERY = 0.1
"""Seconds between two measurements: many time slices."""
_CONTENDED = 0.15
"""Contended from this share of waiting for a core in the time that threads are runnable. With one busy process beside
two threads on two cores it is a quarter; on free cores, a few hundredths."""
_LEAST = 0.02
"""Seconds of runnable time that a measurement needs to be meaningful."""
_PAUSE, _LONGEST = 0.5, 8.0
"""Seconds of sleeping before the next attempt to spin, at first and at most: an attempt costs a tenth of a second of
slow progress."""
_TASKS = Path("/proc/self/task")


class Times(NamedTuple):
    """Seconds that all threads of this process together have run and waited so far."""

    run: float
    waited: float
    """Ready to run, but without a core."""


def scheduled() -> Times | None:
    """The scheduler's statistics of this process; None where there are none."""
    run = waited = 0
    try:
        for task in _TASKS.iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                one, other, _ = (task / "schedstat").read_text().split()
                run, waited = run + int(one), waited + int(other)
    except (OSError, ValueError):
        return None
    return Times(run / 1e9, waited / 1e9) if run else None


class Decision:
    """Decides when to spin and when to sleep; pure."""

    def __init__(self) -> None:
        self.spins = True
        self._pause = _PAUSE
        self._until = 0.0
        self._calm = 0.0
        """When the threads last began to spin."""

    def look(self, now: float, run: float, waited: float) -> bool:
        """Whether to spin from `now` on, given the seconds run and waited since the last call."""
        if not self.spins:
            if now >= self._until:
                self.spins, self._calm = True, now
        elif run + waited >= _LEAST and waited > _CONTENDED * (run + waited):
            self.spins, self._until = False, now + self._pause
            self._pause = min(_LONGEST, 2 * self._pause)
        elif now - self._calm >= _LONGEST:
            self._pause = _PAUSE
        return self.spins


class Sleepers:
    """Enough sleeping OpenMP threads that the other threads do not spin, from `keep` to `release`."""

    def __init__(self) -> None:
        self._gomp = _libgomp()
        self._end: threading.Event | None = None

    @property
    def possible(self) -> bool:
        return self._gomp is not None

    def keep(self, threads: int) -> None:
        """Start them beside this number of threads that compute."""
        if self._end is None and self._gomp is not None:
            self._end = threading.Event()
            size = max(2, len(os.sched_getaffinity(0)) - threads + 2)
            threading.Thread(target=_sleep, args=(self._gomp, size, self._end), daemon=True, name="sleepers").start()

    def release(self) -> None:
        if self._end is not None:
            self._end.set()
            self._end = None


def watch() -> None:
    """Adapt spinning to contention from now on, in a daemon thread."""
    if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" and scheduled() is not None:
        sleepers = Sleepers()
        if sleepers.possible and usable_cores() > 1:
            threading.Thread(target=_watch, args=(sleepers,), daemon=True, name="thread-spinning").start()


def _watch(sleepers: Sleepers) -> None:
    decision, before = Decision(), Times(0.0, 0.0)
    while True:
        time.sleep(_EVERY)
        threads = torch.get_num_threads()
        if threads == 1:  # a single thread never waits for another
            sleepers.release()
            continue
        after = scheduled()
        if after is None:
            return
        if decision.look(time.monotonic(), after.run - before.run, after.waited - before.waited):
            sleepers.release()
        else:
            sleepers.keep(threads)
        before = after


def _sleep(gomp: ctypes.CDLL, size: int, end: threading.Event) -> None:
    """Make a pool by running an empty parallel region; the pool ends with this thread."""
    gomp.GOMP_parallel(ctypes.CDLL(None).time, None, ctypes.c_uint(size), ctypes.c_uint(0))
    end.wait()


def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch computes with; other copies may be loaded too."""
    with contextlib.suppress(OSError, AttributeError):
        mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        found = [path for path in mapped if "libgomp" in Path(path).name]
        found.sort(key=lambda path: "/torch" not in path)
        if found:
            library = ctypes.CDLL(found[0])
            return library if library.GOMP_parallel else None
    return None
