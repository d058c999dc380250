"""The registration of the built-in engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.engine.registry import EngineFactory, EngineResources, EngineRun

if TYPE_CHECKING:
    from dora_rl.engine.interface import RolloutEngine


class BuiltinFactory(EngineFactory):
    """Makes built-in engines. They need nothing but torch and serve every run."""

    def make(self, run: EngineRun, resources: EngineResources) -> RolloutEngine:
        """An engine in this process."""
        from dora_rl.engine.engine import Engine
        from dora_rl.models.loading import load

        loaded = load(run.model)
        engine = Engine(
            loaded.model,
            resources.weights(loaded.model),
            run.engine,
            tokenizer=loaded.tokenizer,
            instance=resources.instance,
            clock=resources.clock,
        )
        engine.set_threads(run.engine.threads or resources.threads)
        return engine
