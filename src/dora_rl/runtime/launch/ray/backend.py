"""The backend for a Ray cluster: each worker is an actor in its own placement group.

Invariants:
- Ray never restarts an actor: the supervisor does, under a name that is unique per restart;
- a worker keeps its placement group over restarts; if its node is lost, Ray finds another one, and until then the
  worker is pending, which is not a failure;
- the placement groups of a supervisor that was killed are removed when the next one starts: Ray keeps them, and what
  they reserve, until the process that started the supervisor ends too;
- a worker that could not be killed, since its node can't be reached, can't reach the run either; if it is a trainer, it
  can't write beside the next one, which waits for the trainer lock of the run directory.
"""

from __future__ import annotations

import contextlib
import logging
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
from dora_rl.runtime.launch.ray.nodes import capacity, cores_of
from dora_rl.runtime.launch.ray.object_store import ObjectStore
from dora_rl.runtime.launch.ray.rendezvous import LOOPBACK, Hello, Rendezvous, this_kernel
from dora_rl.runtime.launch.ray.worker_actor import WorkerActor
from dora_rl.runtime.run_dir import RunDir

logger = logging.getLogger(__name__)


class RayProcess:
    """One worker process on the cluster."""

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
        """Take over the connection of the worker."""
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
            return f"Ray reports: {str(error).splitlines()[0]}"
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
    except OSError:  # it is gone, or belongs to another user and is left to Ray
        return False
    return True


class RayBackend:
    """Starts workers on the nodes of a Ray cluster."""

    def __init__(self, run_dir: RunDir, config: RunConfig, object_store: ObjectStore, supervisor: Any) -> None:
        self._run_dir = run_dir
        self._run = config
        self._config = config.ray
        self._object_store = object_store
        self._supervisor = supervisor
        self._kernel = this_kernel()
        self._node: str = ray.get_runtime_context().get_node_id()
        self._here: str = ray.util.get_node_ip_address()
        self._groups: dict[str, Any] = {}
        self._prefix = f"dora-rl:{run_dir.path.resolve()}:"
        self._session = uuid4().hex
        self._connecting: dict[str, RayProcess] = {}
        self._wake: Callable[[], None] = lambda: None
        self._cores: dict[str, int] = {}
        """Of each node: the cores that it gives to Ray, or that it has, if those are fewer."""
        self._rendezvous = Rendezvous(self._connected)
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
        log = str(self._run_dir.logs.resolve() / f"{worker_id}.log")
        actor = (
            ray.remote(WorkerActor)
            .options(**options)
            .remote(self._supervisor, role, self._rendezvous.expect(name), log)
        )
        served = actor.serve.remote()
        process = RayProcess(actor, served, group, self._kernel, lambda: self._forget(name))
        self._connecting[name] = process
        logger.info("started %s worker %s as an actor", role, name)
        return process

    def cores(self, node: str) -> int:
        return self._cores.get(node, 1)

    def capacity(self) -> int | None:
        return capacity(self._run, self._node) if self._config.instances == "all" else None

    def version_retired(self, version: Version) -> None:
        self._object_store.version_retired(version)

    def discard_kv(self, name: str) -> None:
        self._object_store.take_bundle(name)

    def release(self, worker_id: str) -> None:
        group = self._groups.pop(worker_id, None)
        if group is not None:
            remove_placement_group(group)

    def close(self) -> None:
        self._rendezvous.close()
        for worker_id in list(self._groups):
            self.release(worker_id)

    def rendezvous_address(self, address: str) -> tuple[str, int]:
        """Where a worker on the node of this address connects."""
        here = LOOPBACK if address in (self._here, LOOPBACK) else self._here
        return here, self._rendezvous.listen(here)

    def _group(self, role: str, worker_id: str, need: NeedConfig) -> Any:
        if worker_id not in self._groups:
            pinned = role == "trainer" and not self._config.shared_folder
            where = {"bundle_label_selector": [{"ray.io/node-id": self._node}]} if pinned else {}
            name = f"{self._prefix}{worker_id}:{self._session}"
            self._groups[worker_id] = placement_group([need.bundle()], strategy="PACK", name=name, **where)
        return self._groups[worker_id]

    def _clear(self) -> None:
        """Remove the placement groups that an earlier supervisor of this run has left."""
        for one in placement_group_table().values():
            if one["name"].startswith(self._prefix) and one["state"] != "REMOVED":
                with contextlib.suppress(ValueError):  # it is of another Ray session, and Ray removes it
                    remove_placement_group(get_placement_group(one["name"]))

    def _forget(self, name: str) -> None:
        """Refuse the worker of this name from now on."""
        self._rendezvous.forget(name)
        self._connecting.pop(name, None)

    def _connected(self, name: str, hello: Hello, link: socket.socket) -> None:
        process = self._connecting.pop(name, None)
        if process is None:
            link.close()
            return
        if hello.node not in self._cores:
            self._cores[hello.node] = min(hello.cores, cores_of(hello.node))
        process.connected(hello, link)
        logger.info("worker %s connected from node %s: pid %d", name, hello.node, hello.pid)
        self._wake()


@dataclass(frozen=True, kw_only=True)
class RayMachine(Machine):
    """The machine of a run on a cluster: workers come from the cluster, everything else from this machine."""

    cluster: RayBackend

    def backend(self, run_dir: RunDir) -> RayBackend:  # noqa: ARG002
        return self.cluster
