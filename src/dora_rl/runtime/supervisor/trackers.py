"""Optional experiment trackers: TensorBoard, wandb, trackio. They receive what `metrics.jsonl` has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dora_rl.core.errors import ConfigError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.metrics import Tracker


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Service:
    """wandb, or trackio, which has the same calls."""

    def __init__(self, module: Any, project: str, name: str, config: dict[str, Any]) -> None:
        self._module = module
        module.init(project=project, name=name, config=config)

    def log(self, figures: dict[str, float], step: int) -> None:
        self._module.log({**figures, "version": step})

    def close(self) -> None:
        self._module.finish()


def _tensorboard(run_dir: RunDir, config: RunConfig) -> Tracker | None:
    if not config.logging.tensorboard:
        return None
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "'logging.tensorboard': the package is missing: pip install 'dora-rl[train]', or set it to false"
        ) from error
    return TensorBoard(SummaryWriter(str(run_dir.tensorboard), flush_secs=10))


def _wandb(run_dir: RunDir, config: RunConfig) -> Tracker | None:
    return _service("wandb", config.logging.wandb, run_dir, config)


def _trackio(run_dir: RunDir, config: RunConfig) -> Tracker | None:
    return _service("trackio", config.logging.trackio, run_dir, config)


def _service(name: str, project: str | None, run_dir: RunDir, config: RunConfig) -> Tracker | None:
    if project is None:
        return None
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"'logging.{name}': the package is missing: pip install {name}") from error
    return Service(module, project, run_dir.path.name, config.model_dump(mode="json"))


TRACKERS: list[Callable[[RunDir, RunConfig], Tracker | None]] = [_tensorboard, _wandb, _trackio]
"""Each makes its tracker for a run, or returns None if its setting in `LoggingConfig` is off."""


def trackers(run_dir: RunDir, config: RunConfig) -> list[Tracker]:
    """The trackers that the config names."""
    return [tracker for make in TRACKERS if (tracker := make(run_dir, config)) is not None]
