"""What a rollout engine provides so that `rollout.engine.kind` can name it.

To add an engine, write a package with an `EngineFactory`, and name it in `ENGINES` of `engine.config`, with a section
of `EngineConfig` beside it if the engine has settings of its own. No other module knows the engines by name.

Invariant: a factory is imported when it is first asked for, and it imports torch and the engine's own packages only in
`make`. So a config is checked, and a missing package is reported, without them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dora_rl.engine.config import ENGINES

if TYPE_CHECKING:
    from dora_rl.core.interfaces import WeightFiles, WeightSource
    from dora_rl.core.types import InstanceId, Nanoseconds
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.interface import RolloutEngine
    from dora_rl.models.loading import ModelConfig


class LoraSettings(Protocol):
    """The adapter that a run trains."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> int: ...

    @property
    def targets(self) -> tuple[str, ...] | str:
        """Names of the adapted modules; a string stands for all linear layers."""
        ...


class EngineRun(NamedTuple):
    """The settings of a run that an engine may depend on."""

    model: ModelConfig
    engine: EngineConfig
    lora: LoraSettings | None
    """None: the run trains all weights."""
    mode: str
    mixes_versions: bool
    """The mode loads weights under running requests."""
    max_versions: int
    """Versions that may have requests at once: K + 1."""
    seed: int


class EngineResources(NamedTuple):
    """What a rollout worker gives to its engine."""

    weights: Callable[[Any], WeightSource]
    """Published versions as tensors for a model of this architecture."""
    files: WeightFiles
    """Published versions as files."""
    instance: InstanceId
    clock: Callable[[], Nanoseconds]
    threads: int
    """Threads to begin with; the worker changes them later with `RolloutEngine.set_threads`."""
    fixed_threads: int
    """Threads for an engine that can't change their number: an equal share of the cores."""


class EngineFactory(ABC):
    """Makes engines of one kind, and says what they need and what they can't do."""

    def require_installed(self) -> None:  # noqa: B027 many engines need no further package
        """Raise a `UserError` that says what to install, if a package that the engine needs is missing."""

    def check_run(self, run: EngineRun) -> None:  # noqa: B027 an engine may serve every run
        """Raise a `ValueError` that says which setting to change, if the engine can't serve such a run."""

    @abstractmethod
    def make(self, run: EngineRun, resources: EngineResources) -> RolloutEngine:
        """An engine in this process."""


def engine_factory(kind: str) -> EngineFactory:
    """The factory of the engines of this kind."""
    module, _, name = ENGINES[kind].partition(":")
    factory = getattr(importlib.import_module(module), name)()
    assert isinstance(factory, EngineFactory)
    return factory
