"""Whole runs of a small job with random faults, then an audit: `python -m tests.chaos_run --runs 100 --seed 0`.

The faults are drawn from the seed, but the exact moment of each depends on the machine, so a seed replays the same
faults and not always the same run.

A corrupted ledger page must be refused with an error that says so, or be harmless (unused bytes, or a page of which the
write-ahead log has a newer copy); after the earlier copy is put back, the run continues.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dora_rl.trainer import checkpoint
from tests.runtime.checks import broken, leftovers, strike
from tests.runtime.host import Host, Supervisor
from tests.runtime.making import make_base, make_run, merged, settings

_LONGEST = 120.0
"""Seconds after which a run counts as stalled."""
REFUSALS = ("damaged", "not what", "has lost", "put back", "contradicts", "came back with version", "are gone")
"""Phrases in the errors about a corrupted ledger."""
COUNTED = {
    "drop": "dropped message",
    "double": "doubled message",
    "delay": "delayed message",
    "bundle": "corrupted bundle",
    "full": "full disk",
}
"""Faults that are written to a file when they happen."""
WORKERS = ["i0", "i1", "trainer", "reward0"]


def _leases(folder: str, names: list[str]) -> list[str]:
    """Leases of processes that are just ending: they may vanish while they are copied, and are not needed."""
    return names if Path(folder).name == "leases" else []


class ChaosError(Exception):
    """A promise was broken."""


class Chaos:
    """One run and the faults that are injected into it."""

    def __init__(self, host: Host, base: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.survived: Counter[str] = Counter()
        self._host = host
        self._steps = self.dice.randint(4, 6)
        self._bundles = self.dice.random() < 0.5
        self.folder = make_run(base, f"chaos-{seed}", self._settings(base))
        self._supervisor = self._start()

    def _settings(self, base: Path) -> dict[str, Any]:
        dice = self.dice
        mode = dice.choice(["dora", "dora", "dora", "sync", "one_step_off", "partial"])
        short = {"load": 6.0, "move": 2.0, "score": 10.0, "heartbeat": 3.0, "progress": 10.0, "train": 8.0}
        tree = settings(base, mode, steps=self._steps, max_staleness=dice.randint(0, 4), deadlines=short)
        other = {
            "control": {"group_size": dice.randint(2, 4), "dynamic_sampling": dice.choice([0, 1, 10])},
            "reward": {"functions": ["task.py:solved_thirds"], "timeout_seconds": 3.0},
            "rollout": {"instances": dice.randint(2, 3), "engine": {"slots": dice.choice([1, 1, 2])}},
            "checkpoint": {"every": dice.randint(1, 3)},
            "weights": dice.choice(["disk", "disk", "memory"]),
            "supervision": {"restarts": 50},
        }
        return merged(tree, other)

    def run(self) -> None:
        """Run to the end, with a few random faults."""
        faults: list[tuple[str, Callable[[], bool]]] = [
            ("kill -9 of an instance", lambda: self._kill(self.dice.choice(["i0", "i1"]))),
            ("kill -9 of the trainer", lambda: self._kill("trainer")),
            ("kill -9 of a reward worker", lambda: self._kill("reward0")),
            ("kill -9 of the supervisor", self._kill_supervisor),
            ("stop and continue", self._stop),
            ("dropped message", lambda: self._restart_with("wire", "drop")),
            ("doubled message", lambda: self._restart_with("wire", "double")),
            ("delayed message", lambda: self._restart_with("wire", "delay")),
            ("full disk", lambda: self._restart_with("full")),
            ("clock jump", lambda: self._restart_with("jumps")),
            ("corrupted checkpoint", self._corrupt_checkpoint),
            ("corrupted ledger page", self._corrupt_ledger),
            ("power loss", self._power_loss),
        ]
        if self.dice.random() < 0.1:  # importing everything again takes seconds
            faults.append(("kill -9 of the fork server", lambda: self._kill("fork_server")))
        for name, strikes in self.dice.choices(faults, k=self.dice.randint(2, 4)):
            if strikes() and name not in COUNTED.values():
                self.survived[name] += 1
        self._finish()
        for fault, name in COUNTED.items():
            self.survived[name] += self._happened.count(fault)

    # -- faults -----------------------------------------------------------------------------------------------

    def _kill(self, worker_id: str) -> bool:
        return strike(self._supervisor, worker_id, self.dice, most=30)

    def _kill_supervisor(self) -> bool:
        if not strike(self._supervisor, None, self.dice, most=30):
            return False
        self._supervisor.wait(_LONGEST)
        self._supervisor = self._start()
        return True

    def _stop(self) -> bool:
        worker_id = self.dice.choice([*WORKERS, None])
        if not strike(self._supervisor, worker_id, self.dice, signal.SIGSTOP, most=30):
            return False
        pid = self._supervisor.pid if worker_id is None else self._supervisor.pids()[worker_id]
        time.sleep(self.dice.choice([0.05, 0.5, 2.0]))
        self._supervisor.signal(signal.SIGCONT, worker_id)
        return bool(pid)

    def _restart_with(self, part: str, kind: str = "") -> bool:
        """Resume the run on a machine that has a fault from now on."""
        alive = strike(self._supervisor, None, self.dice, most=15)
        self._supervisor.wait(_LONGEST)
        wire = self._wire(2, kind)
        begin = self.dice.uniform(0.0, 1.5)
        faults: dict[str, Any] = {
            "wire": wire,
            "full": [begin, begin + self.dice.uniform(0.1, 2.0)],
            "jumps": [[begin, self.dice.choice([-1e6, -60.0, 60.0, 1e5])], [begin + 1, self.dice.uniform(-1e4, 1e4)]],
        }
        self._supervisor = self._start(**{part: faults[part]})
        return alive

    def _corrupt_checkpoint(self) -> bool:
        if not self._end_now():
            return False
        found = checkpoint.versions(self.folder.checkpoints)
        last = checkpoint.latest(self.folder.checkpoints)
        # The checkpoint of a finished run is not read again; that the audit notices its damage is right.
        hit = last is not None and len(found) > 1 and found[-1] < self._steps
        if last is not None and hit:
            damage(self.dice.choice(sorted((last / "state").iterdir())), self.dice)
        self._supervisor = self._start()
        return hit

    def _corrupt_ledger(self) -> bool:
        if not self._end_now():
            return False
        there = sorted(self.folder.path.glob("ledger.db*"))
        copies = {path: path.read_bytes() for path in there}
        others = [self.folder.weights, self.folder.checkpoints]
        kept = self.folder.path / "kept"
        for other in others:
            if other.exists():
                shutil.copytree(other, kept / other.name, ignore=_leases)
        damage(self.dice.choice([path for path in there if path.stat().st_size]), self.dice)
        self._supervisor = self._start()
        outcome = self._supervisor.wait(_LONGEST)
        if outcome.get("code") == 0:
            shutil.rmtree(kept, ignore_errors=True)
            return True  # no byte that is read was hit; the audit at the end verifies that
        error = str(outcome.get("error"))
        if outcome.get("code") not in (1, 2) or not any(word in error for word in REFUSALS):
            raise ChaosError(f"a corrupted ledger led to {outcome}")
        for path in self.folder.path.glob("ledger.db*"):
            path.unlink()
        for path, data in copies.items():
            path.write_bytes(data)
        for other in others:
            if (kept / other.name).exists():
                shutil.rmtree(other)
                (kept / other.name).rename(other)
        shutil.rmtree(kept, ignore_errors=True)
        self._supervisor = self._start()
        return True

    def _power_loss(self) -> bool:
        if self.folder.read().weights == "memory" or not self._end_now():
            return False
        wal = self.folder.path / "ledger.db-wal"
        if wal.exists():
            with wal.open("ab") as file:
                file.write(self.dice.randbytes(self.dice.randrange(1, 9000)))  # a commit that was being written
        for path in (self.folder.metrics, self.folder.samples, self.folder.activity, self.folder.events):
            if path.exists():
                path.write_bytes(path.read_bytes()[: self.dice.randint(0, path.stat().st_size)])
        (self.folder.path / "ledger.db-shm").unlink(missing_ok=True)
        self._supervisor = self._start()
        return True

    # -- the run ----------------------------------------------------------------------------------------------

    def _start(self, **faults: Any) -> Supervisor:
        # So small a job has few moves, so in half of the runs every bundle is damaged.
        everywhere = {"wire": self._wire(0)} if self._bundles else {}
        return self._host.start(self.folder, **(everywhere | faults))

    def _wire(self, faults: int, *kinds: str) -> dict[str, Any]:
        seed = self.dice.randrange(1 << 30)
        return {"seed": seed, "faults": faults, "rate": 0.05, "kinds": [*kinds, *(["bundle"] if self._bundles else [])]}

    @property
    def _happened(self) -> list[str]:
        path = self.folder.logs / "faults"
        return path.read_text().splitlines() if path.exists() else []

    def _end_now(self) -> bool:
        """Kill the supervisor if the run has not ended; the caller resumes it."""
        alive = strike(self._supervisor, None, self.dice, most=30)
        if alive:
            self._supervisor.wait(_LONGEST)
        return alive

    def _finish(self) -> None:
        outcome = self._supervisor.wait(_LONGEST)
        for _ in range(3):
            # A fault of the machine may end a supervisor with an error that tells the user to resume.
            if outcome.get("code") == 0:
                break
            if "code" in outcome and "resume" not in str(outcome.get("error")):
                raise ChaosError(f"it ended with {outcome}")
            self._supervisor = self._start()
            outcome = self._supervisor.wait(_LONGEST)
        problems = broken(self._supervisor, outcome, self._steps) or leftovers(self._supervisor, outcome)
        if problems:
            raise ChaosError("; ".join(problems[:5]))


def damage(path: Path, dice: random.Random) -> None:
    """Overwrite some random bytes."""
    data = bytearray(path.read_bytes())
    start = dice.randrange(len(data))
    size = dice.choice([1, 16, 512])
    data[start : start + size] = dice.randbytes(len(data[start : start + size]))
    path.write_bytes(data)


def one(host: Host, base: Path, seed: int) -> tuple[int, str, Counter[str]]:
    """The seed, what was broken (empty if nothing), and the faults survived."""
    chaos = Chaos(host, base, seed)
    try:
        chaos.run()
    except (ChaosError, AssertionError) as error:
        return seed, f"{error}"[:400] or type(error).__name__, chaos.survived
    shutil.rmtree(chaos.folder.path)
    return seed, "", chaos.survived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    console = Console()
    base = make_base(Path(tempfile.mkdtemp(prefix="dora-rl-chaos-")))
    hosts = threading.local()
    everyone: list[Host] = []

    def run(seed: int) -> tuple[int, str, Counter[str]]:
        if not hasattr(hosts, "host"):
            hosts.host = Host()
            everyone.append(hosts.host)
        return one(hosts.host, base, seed)

    survived: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for seed, failure, faults in pool.map(run, range(options.seed, options.seed + options.runs)):
            survived.update(faults)
            if failure:
                failures.append((seed, failure))
                console.print(f"seed {seed}: {failure}", highlight=False, markup=False)
    for host in everyone:
        host.close()
    tell(base, options.runs, survived, [seed for seed, _ in failures])


def tell(base: Path, runs: int, survived: Counter[str], failed: list[int]) -> None:
    """Print the results; runs that broke a promise are kept, and the command fails."""
    console = Console()
    table = Table("fault survived", "times")
    for name, count in sorted(survived.items()):
        table.add_row(name, f"{count:,}")
    console.print(table)
    console.print(f"{runs} runs, {survived.total():,} faults, {len(failed)} broken promises")
    if failed:
        console.print(f"the runs are kept in {base}; replay one with --runs 1 --seed {failed[0]}", highlight=False)
        sys.exit(1)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
