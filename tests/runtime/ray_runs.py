"""Runs on a small Ray cluster of this machine, with nodes that join and leave."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from dora_rl.apps.audit import audited
from dora_rl.runtime.launch.ray.init import need_ray, start_supervisor
from dora_rl.runtime.run_dir import RunDir
from dora_rl.trainer import checkpoint
from tests.runtime.making import merged, settings

_STORE = 80 << 20
"""Bytes of a node's object store: the least that Ray accepts."""


def ray_settings(base: Path, steps: int, **other: Any) -> dict[str, Any]:
    """The small job, for a cluster whose rollout nodes have the named resource `rollout`."""
    tree = settings(base, steps=steps)
    ray = {"instance": {"resources": {"rollout": 1}}, "reward": {"num_cpus": 0.1}}
    # Importing torch on a busy machine takes a while.
    deadlines = {"load": 90.0, "heartbeat": 10.0, "train": 60.0}
    reward = {"functions": ["task.py:unhurried"]}
    on_ray = {"runtime": "ray", "ray": ray, "control": {"deadlines": deadlines}, "reward": reward}
    return merged(merged(tree, on_ray), other)


class Nodes:
    """A cluster with one node for the supervisor and the trainer, and some for instances."""

    def __init__(self, rollout: int = 2) -> None:
        self._ray = need_ray()
        from ray.cluster_utils import Cluster

        args = {"num_cpus": 4, "object_store_memory": _STORE, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=args)
        self.rollout = [self._add() for _ in range(rollout)]
        self._ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def add(self) -> None:
        """Add a node."""
        self.rollout.append(self._add())

    def lose(self, number: int = 0) -> None:
        """Remove a node at once, with everything on it."""
        self._cluster.remove_node(self.rollout.pop(number), allow_graceful=False)

    def restore(self, count: int = 2) -> None:
        """Add nodes until there are this many for rollout."""
        while len(self.rollout) < count:
            self.add()

    def close(self) -> None:
        self._ray.shutdown()
        self._cluster.shutdown()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=2, resources={"rollout": 1}, object_store_memory=_STORE)


class RayRun:
    """A run whose supervisor is an actor."""

    def __init__(self, folder: RunDir) -> None:
        self.folder = folder
        self._ray = need_ray()
        self._hurry = folder.base() / "hurry"
        self._hurry.unlink(missing_ok=True)
        self._start()

    def resume(self) -> None:
        """Resume the run after the supervisor is gone."""
        self._start()

    def kill_supervisor(self) -> None:
        self._ray.kill(self._supervisor, no_restart=True)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._outcome, timeout=60)

    def stop(self) -> None:
        self._ray.get(self._supervisor.stop.remote())

    def over(self) -> bool:
        return bool(self._ray.wait([self._outcome], timeout=0)[0])

    def wait(self, seconds: float = 240.0) -> tuple[str, str]:
        """Let the run end; returns how it ended, and the message about it."""
        self._hurry.touch()
        outcome: tuple[str, str] = self._ray.get(self._outcome, timeout=seconds)
        return outcome

    def notices(self) -> list[str]:
        notices: list[str] = self._ray.get(self._supervisor.notices.remote(0))
        return notices

    def events(self) -> int:
        try:
            return self.folder.events.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def wait_for_events(self, count: int, seconds: float = 240.0) -> bool:
        """Wait until this number of events is on disk; False if the run ends before."""
        end = time.monotonic() + seconds
        while self.events() < count:
            if self.over():
                return False
            assert time.monotonic() < end, f"nothing moves; see {self.folder.path}"
            time.sleep(0.01)
        return True

    def kill(self, worker_id: str, number: int = signal.SIGKILL) -> bool:
        """Send a signal to the current process of a worker."""
        pid = self._pid(worker_id)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def broken(self, outcome: tuple[str, str], steps: int) -> list[str]:
        """The promises that the run has broken."""
        if outcome[0] != "finished":
            return [f"it ended with {outcome}; see {self.folder.path}"]
        audit = audited(self.folder)
        found = list(audit.problems)
        if not audit.finished or audit.steps != steps:
            found.append(f"{audit.steps} steps are done of {steps}")
        if checkpoint.versions(self.folder.checkpoints)[-1:] != [steps]:
            found.append(f"the last checkpoints are {checkpoint.versions(self.folder.checkpoints)}, not {steps}")
        return found

    def _start(self) -> None:
        self._supervisor = start_supervisor(self.folder)
        self._outcome = self._supervisor.go.remote()

    def _pid(self, worker_id: str) -> int | None:
        """Found by its output, which goes to the log of the worker."""
        log = str(self.folder.logs.resolve() / f"{worker_id}.log")
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str((process / "fd" / "1").readlink()) == log:
                    return int(process.name)
        return None
