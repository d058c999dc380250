"""Makes the rollout engine of a worker process, of the kind that the config names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dora_rl.core.cpu_cores import usable_cores
from dora_rl.core.types import InstanceId, Nanoseconds
from dora_rl.engine.interface import RolloutEngine
from dora_rl.engine.registry import EngineResources, engine_factory
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.transport.weight_source import Leasing, StoreFiles, StoreWeights

logger = logging.getLogger(__name__)

Clock = Callable[[], Nanoseconds]


def make_engine(config: RunConfig, store: Leasing, instance: InstanceId, threads: int, clock: Clock) -> RolloutEngine:
    """An engine that serves the versions in the store."""
    logger.info("making an engine of kind %s for %s", config.rollout.engine.kind, config.model.path)
    resources = EngineResources(
        weights=lambda model: StoreWeights(store, model, config.trainer.lora),
        files=StoreFiles(store),
        instance=instance,
        clock=clock,
        threads=threads,
        fixed_threads=max(1, (config.threads or usable_cores()) // config.rollout.instances),
    )
    return engine_factory(config.rollout.engine.kind).make(config.engine_run(), resources)
