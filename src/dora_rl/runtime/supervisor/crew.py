"""Who fills the places of a run now, and with how many threads each computes.

Invariants:
- a name finds the process of that very life, or nobody;
- the cores of a machine are shared by the processes that are on it, and by nobody else.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from dora_rl.core.types import InstanceId
from dora_rl.runtime.launch.cpu_allocation import share
from dora_rl.runtime.launch.process_manager import ProcessManager, WorkerProcess
from dora_rl.runtime.transport import messages as m


class Crew:
    """Instances and trainer of a run."""

    def __init__(self, processes: ProcessManager, *, overlap: bool) -> None:
        self._processes = processes
        self._overlap = overlap
        """Rollout goes on while the trainer works."""
        self._instances: dict[InstanceId, WorkerProcess] = {}
        self.places: list[WorkerProcess] = []
        """All instances that the run shall have, in the order in which they came; also those given up."""
        self._trainer: WorkerProcess | None = None
        self.ranks: list[WorkerProcess] = []
        """The other processes that train."""
        self._meeting: m.JoinRanks | None = None
        self.training = 0
        """Groups that the trainer has not reported back, and a step that it applies."""

    @property
    def trainer(self) -> WorkerProcess:
        assert self._trainer is not None, "the trainer comes first"
        return self._trainer

    def begin_trainer(self, ranks: int) -> None:
        self._trainer = self._processes.start("trainer", "trainer", ranks=ranks)
        for rank in range(1, ranks):
            self.ranks.append(self._processes.start("rank", f"rank{rank}", rank=rank, ranks=ranks))

    def meet(self, meeting: m.RanksAddress) -> None:
        """The first rank waits for the others there."""
        self._meeting = m.JoinRanks(address=meeting.address, port=meeting.port)
        for process in self.ranks:
            if process.last_message_at is not None:
                process.send(self._meeting)

    def rank_ready(self, process: WorkerProcess) -> None:
        """A rank can be told where to meet; if that is not known yet, it will be."""
        if self._meeting is not None:
            process.send(self._meeting)

    def trainer_lost(self) -> None:
        """The ranks train together or not at all."""
        self.training = 0
        self._meeting = None
        for process in self.ranks:
            self._processes.restart_with(self.trainer, process)

    def begin_instance(self) -> None:
        """At the first place that is free."""
        taken = {process.worker_id for process in self.places}
        place = next(f"i{number}" for number in itertools.count() if f"i{number}" not in taken)
        process = self._processes.start("instance", place)
        self.places.append(process)
        self._fill(process)

    def lost(self, process: WorkerProcess, *, again: bool) -> None:
        """An instance has ended; its next life is known by the name that it will have."""
        self._instances = {name: one for name, one in self._instances.items() if one is not process}
        if again:
            self._fill(process, incarnation=process.incarnation + 1)

    def instance(self, name: InstanceId) -> WorkerProcess | None:
        process = self._instances.get(name)
        return process if process is not None and process.name == name else None

    def to(self, name: InstanceId, message: m.Message) -> WorkerProcess | None:
        """To an instance that is gone nothing is sent: the orchestrator is being told so."""
        process = self.instance(name)
        if process is not None:
            process.send(message)
        return process

    def share_cores(self) -> None:
        """Who works gets cores, who waits gives them up."""
        machines: dict[str, list[WorkerProcess]] = defaultdict(list)
        for process in self._instances.values():
            machines[process.machine].append(process)
        if self._trainer is not None:
            machines[self._trainer.machine].append(self._trainer)
        for machine, here in machines.items():
            busy = sum(bool(process.busy) for process in here)
            trains = self.training > 0 and self._trainer in here
            instances = sum(process is not self._trainer for process in here)
            cores = self._processes.cores(machine)
            shares = share(cores, instances, busy, trainer_busy=trains, overlap=self._overlap)
            for process in here:
                trains_here = process is self._trainer
                _set_threads(
                    process, max(1, shares.trainer // (1 + len(self.ranks))) if trains_here else shares.instance
                )

    def _fill(self, process: WorkerProcess, incarnation: int | None = None) -> None:
        self._instances[f"{process.worker_id}.{incarnation or process.incarnation}"] = process


def _set_threads(process: WorkerProcess, threads: int) -> None:
    if process.threads != threads:
        process.threads = threads
        process.send(m.SetThreads(count=threads))
