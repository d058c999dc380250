"""Threads spin on free cores and sleep on contended ones, and the user's own settings win."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from dora_rl.runtime.launch.fork_server import worker_environment
from dora_rl.runtime.workers.thread_spinning import _CONTENDED, _EVERY, _LONGEST, Decision, scheduled


def looks(decision: Decision, seconds: float, share: float, begin: float = 0.0) -> list[bool]:
    """What is decided over so many seconds of two threads that wait for a core in this share of the time they spin."""
    found = []
    for number in range(round(seconds / _EVERY)):
        waited = share * 2 * _EVERY if decision.spins else 0.0
        found.append(decision.look(begin + number * _EVERY, 2 * _EVERY - waited, waited))
    return found


def test_threads_spin_while_nobody_else_wants_the_cores() -> None:
    assert all(looks(Decision(), 60.0, 0.5 * _CONTENDED))


def test_an_idle_process_learns_nothing() -> None:
    assert Decision().look(0.0, run=0.0001, waited=0.009)


def test_contended_threads_sleep_but_for_rare_tries() -> None:
    found = looks(Decision(), 120.0, 0.3)
    assert not found[0], "at once"
    assert sum(found[100:]) / len(found[100:]) < 0.03
    tries = [number for number, spins in enumerate(found) if spins]
    assert len(tries) > 5
    assert max(b - a for a, b in itertools.pairwise(tries)) * _EVERY <= _LONGEST + 2 * _EVERY


def test_threads_spin_again_soon_after_the_others_are_gone() -> None:
    decision = Decision()
    looks(decision, 60.0, 0.3)
    found = looks(decision, 60.0, 0.0, begin=60.0)
    assert all(found[round(_LONGEST / _EVERY) + 2 :])
    later = looks(decision, 1.0, 0.3, begin=120.0)
    assert any(later), "after a calm while the pauses are short again"


def test_the_scheduler_says_how_long_threads_ran() -> None:
    before = scheduled()
    if before is None:
        pytest.skip("this system does not count it")
    while (after := scheduled()) is not None and after.run <= before.run:
        sum(range(10**6))


def test_how_threads_wait_may_be_given() -> None:
    assert worker_environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & worker_environment({name: "1"}).keys()


PROGRAM = """
import os, resource, threading, time
import torch
from dora_rl.runtime.workers.thread_spinning import Sleepers
torch.set_num_threads(2)
a = torch.randn(300, 300)

def sleeps():
    "Times that a thread went to sleep, for each of 200 parallel regions with pauses between them."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(200):
        a + a
        end = time.perf_counter() + 2e-4  # far shorter than the spinning lasts
        while time.perf_counter() < end:
            pass
    return (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / 200

def threads(count):
    while len(os.listdir("/proc/self/task")) != count:
        time.sleep(0.001)

a + a
sleepers = Sleepers()
assert sleepers.possible
spinning = sleeps()
before = len(os.listdir("/proc/self/task"))
sleepers.keep(2)
sleepers.keep(2)  # once
threads(before + 1 + max(1, len(os.sched_getaffinity(0)) - 1))
time.sleep(0.5)
asleep = sleeps()
sleepers.release()
threads(before)
again = sleeps()
print(spinning, asleep, again)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="libgomp's switch is Linux's")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has one thread")
def test_sleeping_threads_make_the_others_sleep_while_they_are_kept() -> None:
    wait = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000000000"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=os.environ | wait, timeout=600
    )
    assert done.returncode == 0, done.stderr
    spinning, asleep, again = map(float, done.stdout.split())
    assert spinning < 0.2
    assert asleep > 0.5
    assert again < 0.2
