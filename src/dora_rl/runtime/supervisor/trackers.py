"""Optional experiment trackers: TensorBoard, wandb, trackio, MLflow. They receive what `metrics.jsonl` has.

Trackers with tables also receive samples of completions, every `logging.completions_every` steps: one row for each
response, with its prompt, reward, the reward of each function, version and staleness. On trackio they are traces, too.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dora_rl.core.errors import ConfigError
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.metrics import Tracker

COMPLETIONS = "completions"
_COLUMNS = ("step", "version", "staleness", "group", "prompt", "response", "tokens", "stop", "reward")
_LONGEST_PARAMETER = 500
_MOST_PARAMETERS = 100
"""MLflow's limits: characters of a parameter, and parameters in one request."""
_SHOWN_TABLES = 20


class TensorBoard:
    """Event files for TensorBoard, which has no tables."""

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

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        columns, rows = table(samples)
        self._module.log({COMPLETIONS: self._module.Table(columns=columns, data=rows), "version": step})

    def close(self) -> None:
        self._module.finish()


class Trackio(Service):
    """trackio, which also shows each completion as a trace."""

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        super().log_completions(samples, step)
        for number, sample in enumerate(samples):
            messages = [
                {"role": "user", "content": sample["prompt"]},
                {"role": "assistant", "content": sample["response"]},
            ]
            about = {key: value for key, value in sample.items() if key not in ("prompt", "response")}
            trace = self._module.Trace(messages=messages, metadata=about)
            self._module.log({f"{COMPLETIONS}/{number}": trace, "version": step})


class MLflow:
    """A run of an MLflow experiment; a run of ours that is resumed continues its run there.

    `MLFLOW_TRACKING_URI` says where the experiments are, as for every program that uses MLflow.
    """

    def __init__(self, module: Any, experiment: str, run_dir: RunDir, config: dict[str, Any]) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._tables: list[dict[str, str]] = []
        try:
            self._client = module.MlflowClient()
            known = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if known is None else known.experiment_id
            self._run = self._open(number, run_dir, config)
        except module.exceptions.MlflowException as error:
            reason = str(error).strip().partition(". ")[0].rstrip(".")
            raise ConfigError(f"'logging.mlflow': {reason}; set MLFLOW_TRACKING_URI to a server or database") from error

    def log(self, figures: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        columns, rows = table(samples)
        path = f"{COMPLETIONS}/version-{step:08d}.json"
        self._client.log_dict(self._run, {"columns": columns, "data": rows}, path)
        # MLflow shows the artifacts in this tag as tables; a tag has a limited length.
        self._tables = [*self._tables, {"path": path, "type": "table"}][-_SHOWN_TABLES:]
        self._client.set_tag(self._run, "mlflow.loggedArtifacts", json.dumps(self._tables))

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _open(self, experiment: str, run_dir: RunDir, config: dict[str, Any]) -> str:
        tag, value = "dora_rl.run", run_dir.memory.rpartition("-")[2]  # of the path: any run may have this name
        found = self._client.search_runs([experiment], filter_string=f"tags.`{tag}` = '{value}'")
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        run = self._client.create_run(experiment, run_name=run_dir.path.name, tags={tag: value})
        parameters = [self._entities.Param(name, str(value)[:_LONGEST_PARAMETER]) for name, value in _flat(config)]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(run.info.run_id, params=parameters[start : start + _MOST_PARAMETERS])
        return str(run.info.run_id)


def table(samples: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """The columns and rows of a table of completions, with a column for each component of the reward."""
    components = sorted({name for sample in samples for name in sample["reward_components"]})
    columns = [*_COLUMNS, *(f"reward/{name}" for name in components)]
    rows = [
        [*(sample[name] for name in _COLUMNS), *(sample["reward_components"].get(name) for name in components)]
        for sample in samples
    ]
    return columns, rows


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    project = config.logging.wandb
    return None if project is None else Service(_module("wandb"), project, run_dir.path.name, _document(config))


def _trackio(run_dir: RunDir, config: RunConfig) -> Tracker | None:
    project = config.logging.trackio
    return None if project is None else Trackio(_module("trackio"), project, run_dir.path.name, _document(config))


def _mlflow(run_dir: RunDir, config: RunConfig) -> Tracker | None:
    experiment = config.logging.mlflow
    return None if experiment is None else MLflow(_module("mlflow"), experiment, run_dir, _document(config))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"'logging.{name}': the package is missing: pip install {name}") from error


def _document(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


TRACKERS: list[Callable[[RunDir, RunConfig], Tracker | None]] = [_tensorboard, _wandb, _trackio, _mlflow]
"""Each makes its tracker for a run, or returns None if its setting in `LoggingConfig` is off."""


def trackers(run_dir: RunDir, config: RunConfig) -> list[Tracker]:
    """The trackers that the config names."""
    return [tracker for make in TRACKERS if (tracker := make(run_dir, config)) is not None]
