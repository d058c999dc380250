"""How the CPU cores of each node are shared by the instances and the trainer that run there.

Workers that compute get cores, and workers that wait give them up. The threads of a worker are changed only when the
load has changed.
"""

from __future__ import annotations

from collections import defaultdict

from dora_rl.runtime.launch.cpu_allocation import share
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.supervisor.rollout_client import RolloutClient
from dora_rl.runtime.supervisor.trainer_client import TrainerClient
from dora_rl.runtime.transport import messages as m


class CoreSharing:
    """Threads of all workers of a run."""

    def __init__(
        self, processes: ProcessManager, rollout: RolloutClient, trainer: TrainerClient, *, overlap: bool
    ) -> None:
        self._processes = processes
        self._rollout = rollout
        self._trainer = trainer
        self._overlap = overlap
        """Rollout continues while the trainer works."""
        self._seen = -1

    def update(self) -> None:
        """Set the threads of each worker, if the load has changed."""
        seen = self._rollout.load_changes + self._trainer.load_changes + self._processes.starts
        if seen != self._seen:
            self._seen = seen
            self._share()

    def _share(self) -> None:
        nodes: dict[str, list[WorkerProcess]] = defaultdict(list)
        for worker in self._rollout.workers:
            if not worker.given_up:
                nodes[worker.node].append(worker)
        trainer = self._trainer.worker if self._trainer.started else None
        if trainer is not None:
            nodes[trainer.node].append(trainer)
        for node, workers in nodes.items():
            instances = [worker for worker in workers if worker is not trainer]
            shares = share(
                self._processes.cores(node),
                len(instances),
                sum(map(self._rollout.busy, instances)),
                trainer_busy=self._trainer.busy and trainer in workers,
                overlap=self._overlap,
            )
            for worker in workers:
                ranks = 1 + len(self._trainer.ranks)
                _set_threads(worker, max(1, shares.trainer // ranks) if worker is trainer else shares.instance)


def _set_threads(worker: WorkerProcess, threads: int) -> None:
    if worker.threads != threads:
        worker.threads = threads
        worker.send(m.SetThreads(count=threads))
