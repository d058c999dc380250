"""The registration of vLLM: what it needs, which runs it can't serve, and how an engine is made."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from dora_rl.engine.registry import EngineFactory, EngineResources, EngineRun
from dora_rl.engine.vllm.version_check import require

if TYPE_CHECKING:
    from dora_rl.core.types import InstanceId
    from dora_rl.engine.interface import RolloutEngine

_EMBEDDINGS = ("embed_tokens", "wte")


class VllmFactory(EngineFactory):
    """Makes engines that drive vLLM."""

    def require_installed(self) -> None:
        """Refuse to start without a supported version of vLLM."""
        require()

    def check_run(self, run: EngineRun) -> None:
        """Refuse modes that change weights under running requests, and adapters of embeddings."""
        if run.mixes_versions:
            raise ValueError(f"'control.mode' can't be '{run.mode}' with vLLM, which would change weights under old KV")
        if run.lora is None or isinstance(run.lora.targets, str):
            return
        embeddings = [target for target in run.lora.targets if target.rpartition(".")[2] in _EMBEDDINGS]
        if embeddings:
            raise ValueError(f"'trainer.lora.targets': vLLM serves no adapter of embeddings; leave out {embeddings[0]}")

    def make(self, run: EngineRun, resources: EngineResources) -> RolloutEngine:
        """An engine in this process."""
        from dora_rl.engine.vllm.core import Core, Lora
        from dora_rl.engine.vllm.engine import VllmEngine
        from dora_rl.engine.vllm.serving import Adapters, AllWeights, Serving
        from dora_rl.models.loading import linear_modules, load_tokenizer

        settings, lora = run.engine, None
        if run.lora is not None:
            targets = run.lora.targets
            lora = Lora(
                run.lora.rank, run.lora.alpha, linear_modules(run.model) if isinstance(targets, str) else targets
            )
        slots = 1 if lora is None else max(settings.slots, run.max_versions)
        core = Core(
            run.model,
            settings,
            slots=slots,
            lora=lora,
            threads=settings.threads or resources.fixed_threads,
            seed=_seed(run.seed, resources.instance),
        )
        # With several devices each has only a part of a tensor, so there is nothing to compare with the file.
        prove = settings.vllm.prove and settings.vllm.tensor_parallel_size == 1
        serving: Serving
        if lora is None:
            serving = AllWeights(core, resources.files, prove=prove)
        else:
            serving = Adapters(core, resources.files, slots, lora, prove=prove)
        return VllmEngine(
            core,
            serving,
            settings,
            tokenizer=load_tokenizer(run.model),
            instance=resources.instance,
            clock=resources.clock,
        )


def _seed(seed: int, instance: InstanceId) -> int:
    """A seed for each instance and each of its restarts: vLLM's generator knows neither trajectory nor position."""
    digest = hashlib.blake2b(f"{seed} {instance}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
