"""Whole runs on a three-node Ray cluster with random faults, then an audit: `python -m tests.chaos_ray --runs 10`.

Faults: an instance, the trainer or a reward worker is killed with SIGKILL; the supervisor's actor is killed and the run
resumed; a worker is stopped for a while; a node is lost with everything on it, and another one joins.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.chaos_run import tell
from tests.runtime.making import make_base, make_run, merged
from tests.runtime.ray_runs import Nodes, RayRun, ray_settings


class RayChaos:
    """One run and the faults that are injected into it."""

    def __init__(self, nodes: Nodes, base: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.survived: Counter[str] = Counter()
        self._nodes = nodes
        self._steps = self.dice.randint(30, 50)
        nodes.restore()
        other = {
            "control": {"max_staleness": self.dice.randint(0, 4), "group_size": self.dice.randint(2, 4)},
            "rollout": {"engine": {"slots": self.dice.choice([1, 2])}},
            "checkpoint": {"every": self.dice.randint(1, 3)},
            "trainer": {"ranks": self.dice.choice([1, 1, 2])},
            "supervision": {"restarts": 50},
        }
        self.run_ = RayRun(make_run(base, f"chaos-ray-{seed}", merged(ray_settings(base, self._steps), other)))

    def run(self) -> None:
        """Run to the end, with a few random faults."""
        faults: list[tuple[str, Callable[[], bool]]] = [
            ("kill -9 of an instance", lambda: self.run_.kill(self.dice.choice(["i0", "i1"]))),
            ("kill -9 of the trainer", lambda: self.run_.kill("trainer")),
            ("kill -9 of a reward worker", lambda: self.run_.kill("reward0")),
            ("loss of the supervisor", self._kill_supervisor),
            ("stop and continue", self._stop),
            ("loss of a node, and a new one", self._lose_node),
            ("loss of a node, and a new one", self._lose_node),
        ]
        for name, strikes in self.dice.sample(faults, k=self.dice.randint(2, 3)):
            later = self.run_.events() + self.dice.randint(5, 60)
            if self.run_.wait_for_events(later) and strikes():
                self.survived[name] += 1
        problems = self.run_.broken(self.run_.wait(), self._steps)
        assert not problems, "; ".join(problems[:5])

    def _kill_supervisor(self) -> bool:
        if self.run_.over():
            return False
        self.run_.kill_supervisor()
        self.run_.resume()
        return True

    def _stop(self) -> bool:
        worker_id = self.dice.choice(["i0", "i1", "trainer", "reward0"])
        if not self.run_.kill(worker_id, signal.SIGSTOP):
            return False
        time.sleep(self.dice.choice([0.05, 0.5, 2.0]))
        self.run_.kill(worker_id, signal.SIGCONT)
        return True

    def _lose_node(self) -> bool:
        self._nodes.lose(self.dice.randrange(len(self._nodes.rollout)))
        self.run_.wait_for_events(self.run_.events() + 10)
        self._nodes.add()
        return not self.run_.over()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    options = parser.parse_args()
    console = Console()
    base = make_base(Path(tempfile.mkdtemp(prefix="dora-rl-chaos-ray-")))
    nodes = Nodes()
    survived: Counter[str] = Counter()
    failed: list[int] = []
    for seed in range(options.seed, options.seed + options.runs):
        chaos = RayChaos(nodes, base, seed)
        try:
            chaos.run()
        except AssertionError as error:
            failed.append(seed)
            console.print(f"seed {seed}: {error}", highlight=False, markup=False)
        else:
            shutil.rmtree(chaos.run_.folder.path)
        survived += chaos.survived
    nodes.close()
    tell(base, options.runs, survived, failed)


if __name__ == "__main__":
    main()
