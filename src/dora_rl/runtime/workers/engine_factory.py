"""The rollout engine of an instance, as the config chooses it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from dora_rl.core.cpu_cores import usable_cores
from dora_rl.core.types import InstanceId, Nanoseconds
from dora_rl.engine.engine import Engine
from dora_rl.engine.interface import RolloutEngine
from dora_rl.models.loading import linear_modules, load, load_tokenizer
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.transport.weight_source import Leasing, StoreFiles, StoreWeights

Clock = Callable[[], Nanoseconds]


def make_engine(config: RunConfig, store: Leasing, instance: InstanceId, threads: int, clock: Clock) -> RolloutEngine:
    """An engine that serves the versions in the store."""
    if config.rollout.engine.kind == "vllm":
        return _vllm(config, store, instance, clock)
    loaded = load(config.model)
    source = StoreWeights(store, loaded.model, config.trainer.lora)
    engine = Engine(
        loaded.model, source, config.rollout.engine, tokenizer=loaded.tokenizer, instance=instance, clock=clock
    )
    engine.set_threads(config.rollout.engine.threads or threads)
    return engine


def _vllm(config: RunConfig, store: Leasing, instance: InstanceId, clock: Clock) -> RolloutEngine:
    from dora_rl.engine.vllm.core import Core, Lora
    from dora_rl.engine.vllm.engine import VllmEngine
    from dora_rl.engine.vllm.serving import Adapters, AllWeights, Serving

    settings, adapts = config.rollout.engine, config.trainer.lora
    lora: Lora | None = None
    if adapts is not None:
        named = linear_modules(config.model) if isinstance(adapts.targets, str) else adapts.targets
        lora = Lora(adapts.rank, adapts.alpha, named)
    slots = 1 if lora is None else max(settings.slots, config.control.staleness + 1)
    core = Core(
        config.model,
        settings,
        slots=slots,
        lora=lora,
        threads=settings.threads or max(1, (config.threads or usable_cores()) // config.rollout.instances),
        seed=_seed(config.seed, instance),
    )
    prove = settings.vllm.prove and settings.vllm.tensor_parallel_size == 1
    files = StoreFiles(store)
    serving: Serving
    if lora is None:
        serving = AllWeights(core, files, prove=prove)
    else:
        serving = Adapters(core, files, slots, lora, prove=prove)
    tokenizer = load_tokenizer(config.model)
    return VllmEngine(core, serving, settings, tokenizer=tokenizer, instance=instance, clock=clock)


def _seed(seed: int, instance: InstanceId) -> int:
    """Instances, and the lives of one, draw different numbers: vLLM's generator knows neither trajectory nor place."""
    digest = hashlib.blake2b(f"{seed} {instance}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
