"""The side of the command: connects to a cluster or starts one, and starts the supervisor of a run in it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.core.cpu_cores import usable_cores
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig
    from dora_rl.runtime.run_dir import RunDir

INSTALL = "the Ray runtime requires Ray: pip install 'dora-rl[ray]'"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray gives its workers a high niceness; the workers of a run set their own.
    "RAY_worker_niceness": "0",
}
_CALLS = 32
"""Calls of other actors that the supervisor serves at a time, in addition to the run itself."""


def need_ray() -> Any:
    """Ray, with its messages turned off; a missing package is a `UserError`."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError(INSTALL) from error
    return ray


@contextlib.contextmanager
def cluster(config: RunConfig) -> Iterator[None]:
    """Connect to the cluster of the run; a cluster that is started here is stopped at the end."""
    ray = need_ray()
    if ray.is_initialized():
        yield
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": None}
    if config.ray.address:
        settings["address"] = config.ray.address
    else:
        settings |= {
            "address": "local",
            "num_cpus": max(usable_cores(), _cpus(config)),
            "include_dashboard": False,
        }
    try:
        ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot connect to a Ray cluster at '{config.ray.address}': {str(error).splitlines()[0]}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def start_supervisor(run_dir: RunDir, bound: int | None = None, kind: type | None = None) -> Any:
    """Start the supervisor actor of a run on this node, which has the run directory."""
    ray = need_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from dora_rl.runtime.launch.ray.supervisor_actor import SupervisorActor

    here = ray.get_runtime_context().get_node_id()
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "max_concurrency": _CALLS,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    return ray.remote(kind or SupervisorActor).options(**options).remote(str(Path(run_dir.path).resolve()), bound)


def _cpus(config: RunConfig) -> int:
    """CPUs that all workers of the run need together, if they share one machine."""
    ray, rollout = config.ray, config.rollout.instances + (config.evaluation.every > 0)
    trainer, reward = config.trainer.ranks * ray.trainer.num_cpus, config.reward.workers * ray.reward.num_cpus
    needed = trainer + rollout * ray.instance.num_cpus + reward
    return int(needed + 0.999)
