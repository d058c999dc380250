"""Optional experiment trackers: TensorBoard, wandb, trackio. They receive what `metrics.jsonl` has."""

from __future__ import annotations

import importlib
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


def trackers(run_dir: RunDir, config: RunConfig) -> list[Tracker]:
    """The trackers that the config names."""
    found: list[Tracker] = []
    if config.logging.tensorboard:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "'logging.tensorboard': the package is missing: pip install 'dora-rl[train]', or set it to false"
            ) from error
        found.append(TensorBoard(SummaryWriter(str(run_dir.tensorboard), flush_secs=10)))
    for name, project in (("wandb", config.logging.wandb), ("trackio", config.logging.trackio)):
        if project is not None:
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(f"'logging.{name}': the package is missing: pip install {name}") from error
            found.append(Service(module, project, run_dir.path.name, config.model_dump(mode="json")))
    return found
