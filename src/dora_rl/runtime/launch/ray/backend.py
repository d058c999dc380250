"""A Ray cluster as the host of a run's processes: an actor each, in a placement group each.

Invariants:
- an actor is never restarted by Ray: the supervisor does that, under a name of its own for each life;
- a place keeps its placement group over its lives; if its node is lost, Ray finds another for it, and until then the
  process waits for room, which is no failure;
- the groups of a supervisor that was killed go when the next one begins: Ray keeps them, and what they hold, until
  whoever started the supervisor ends as well;
- a process that could not be ended, since its node can't be reached, is heard by nobody; a trainer among them can't
  write beside the next one, which waits for the lock on the run's folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora_rl.core.os_processes import alive
from dora_rl.core.types import Version
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.launch.machine import Machine
from dora_rl.runtime.launch.ray.config import NeedConfig
from dora_rl.runtime.launch.ray.nodes import cores_of, room
from dora_rl.runtime.launch.ray.object_store import ObjectStore
from dora_rl.runtime.launch.ray.rendezvous import LOOPBACK, Hello, Rendezvous, this_kernel
from dora_rl.runtime.launch.ray.worker_actor import WorkerActor
from dora_rl.runtime.run_dir import RunDir


class RayProcess:
    """One process, as the cluster knows it."""

    def __init__(self, actor: Any, served: Any, group: Any, kernel: str, forget: Callable[[], None]) -> None:
        self._actor = actor
        self._forget = forget
        self._served = served
        self._group = group
        self._kernel = kernel
        self._pid: int | None = None
        self.link: socket.socket | None = None
        self.node = ""

    def connected(self, hello: Hello, link: socket.socket) -> None:
        """It has come up."""
        self.node = hello.node
        self._pid = hello.pid if hello.kernel == self._kernel else None
        self.link = link

    @property
    def pending(self) -> bool:
        return self.link is None and placement_group_table(self._group).get("state") != "CREATED"

    def alive(self) -> bool:
        return not ray.wait([self._served], timeout=0)[0]

    def failure(self) -> str:
        if self.alive():
            return ""
        try:
            ray.get(self._served)
        except ray.exceptions.RayError as error:
            return f"Ray says: {str(error).splitlines()[0]}"
        return "its process ended"

    def kill(self) -> None:
        self._forget()
        ray.kill(self._actor, no_restart=True)
        if self._pid is not None and _kill(self._pid):
            while alive(self._pid):
                time.sleep(0.001)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:  # it is gone, or another user's, which is left to Ray
        return False
    return True


class RayBackend:
    """The cluster."""

    def __init__(self, folder: RunDir, config: RunConfig, shelf: ObjectStore, supervisor: Any) -> None:
        self._folder = folder
        self._run = config
        self._config = config.ray
        self._shelf = shelf
        self._supervisor = supervisor
        self._kernel = this_kernel()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._here: str = ray.util.get_node_ip_address()
        self._groups: dict[str, Any] = {}
        self._mine = f"dora-rl:{folder.path.resolve()}:"
        self._life = uuid4().hex
        self._hosted: dict[str, RayProcess] = {}
        self._wake: Callable[[], None] = lambda: None
        self._cores: dict[str, int] = {}
        """Of each node: what it gives to Ray, or what it has, if that is less."""
        self._door = Rendezvous(self._let_in)
        self._clear()

    def on_connect(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def start(self, role: str, worker_id: str, name: str) -> RayProcess:
        role = "trainer" if role == "rank" else role
        need: NeedConfig = getattr(self._config, role)
        group = self._group(role, worker_id, need)
        options = {
            "num_cpus": need.num_cpus,
            "num_gpus": need.num_gpus,
            "resources": need.resources,
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        log = str(self._folder.logs.resolve() / f"{worker_id}.log")
        actor = ray.remote(WorkerActor).options(**options).remote(self._supervisor, role, self._door.expect(name), log)
        served = actor.serve.remote()
        self._hosted[name] = hosted = RayProcess(actor, served, group, self._kernel, lambda: self._forget(name))
        return hosted

    def cores(self, node: str) -> int:
        return self._cores.get(node, 1)

    def capacity(self) -> int | None:
        """How many instances the cluster has room for, if it is to be filled."""
        return room(self._run, self._node) if self._config.instances == "all" else None

    def version_retired(self, version: Version) -> None:
        self._shelf.retired(version)

    def discard_kv(self, name: str) -> None:
        self._shelf.take(name)

    def release(self, worker_id: str) -> None:
        group = self._groups.pop(worker_id, None)
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        self._door.close()
        for worker_id in list(self._groups):
            self.release(worker_id)

    def door(self, address: str) -> tuple[str, int]:
        """Where a process of this node of the cluster knocks."""
        here = LOOPBACK if address in (self._here, LOOPBACK) else self._here
        return here, self._door.listen(here)

    def _group(self, role: str, worker_id: str, need: NeedConfig) -> Any:
        if worker_id not in self._groups:
            pinned = role == "trainer" and not self._config.shared_folder
            where = {"bundle_label_selector": [{"ray.io/node-id": self._node}]} if pinned else {}
            name = f"{self._mine}{worker_id}:{self._life}"
            self._groups[worker_id] = placement_group([need.bundle()], strategy="PACK", name=name, **where)
        return self._groups[worker_id]

    def _clear(self) -> None:
        """Remove what an earlier supervisor of this run has left."""
        for one in placement_group_table().values():
            if one["name"].startswith(self._mine) and one["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # of another session, which Ray clears
                    remove_placement_group(get_placement_group(one["name"]))

    def _forget(self, name: str) -> None:
        """Whoever comes under this name from now on comes too late."""
        self._door.forget(name)
        self._hosted.pop(name, None)

    def _let_in(self, name: str, hello: Hello, link: socket.socket) -> None:
        hosted = self._hosted.pop(name, None)
        if hosted is None:
            link.close()
            return
        if hello.node not in self._cores:
            self._cores[hello.node] = min(hello.cores, cores_of(hello.node))
        hosted.connected(hello, link)
        self._wake()


@dataclass(frozen=True, kw_only=True)
class RayMachine(Machine):
    """A cluster, as the machine of a run."""

    cluster: RayBackend

    def backend(self, run_dir: RunDir) -> RayBackend:  # noqa: ARG002
        return self.cluster
