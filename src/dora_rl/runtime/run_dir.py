"""The run directory: the one module that knows which file of a run is where.

config.json     the resolved configuration
ledger.db       the outcome of every prompt, and the event log that the run is resumed from
events.jsonl    the event log in readable form: one event with its commands per line
metrics.jsonl   the metrics of each step
samples.jsonl   a few responses per step as text
activity.jsonl  what slots and trainer spent their time on, in windows
weights/        published versions that are still needed
checkpoints/    what training is resumed from; `policy/` in each is for users, `best/` has that of the best version
inputs/         functions, rows and models that a Python program passed to `dora_rl.train`
logs/           logs of the supervisor and of each worker
tensorboard/    the metrics for TensorBoard
report.html     the report about the run
.lock .trainer  locks of the supervisor and of the trainer: there is at most one of each
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.core.config import build
from dora_rl.core.durable_files import sync
from dora_rl.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    # Only for types: commands that only read a run directory need not import torch.
    from dora_rl.runtime.config import RunConfig
    from dora_rl.weights.store import WeightStore

_ALL_VERSIONS = 1 << 30
"""The orchestrator decides which versions are retired; the store frees none by itself."""


class RunDir:
    """The paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.ledger = path / "ledger.db"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.activity = path / "activity.jsonl"
        self.weights = path / "weights"
        self.checkpoints = path / "checkpoints"
        self.inputs = path / "inputs"
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.report = path / "report.html"
        self.lock = path / ".lock"
        self.trainer_lock = path / ".trainer"

    @classmethod
    def create(cls, config: RunConfig, base: Path, name: str | None = None) -> RunDir:
        """Make a new directory below the config's `out`, with the config; its other paths are relative to `base`."""
        run_dir = cls.reserve(Path(config.out), name)
        run_dir.begin(config, base)
        return run_dir

    @classmethod
    def reserve(cls, parent: Path, name: str | None = None) -> RunDir:
        """Make a new directory below `parent`; it is that of a run once `begin` has written its config."""
        cls.check_name(name)
        stem = name or time.strftime("%Y%m%d-%H%M%S")
        path = parent / stem
        for number in range(2, 1000):
            if not path.exists():
                break
            path = parent / f"{stem}-{number}"
        run_dir = cls(path)
        try:
            run_dir.logs.mkdir(parents=True)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise UserError(unwritable(parent, error)) from error
        return run_dir

    def begin(self, config: RunConfig, base: Path) -> None:
        """Write the config of a new run; its paths are relative to `base`."""
        try:
            self._write(config, base.resolve())
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise UserError(unwritable(self.path.parent, error)) from error

    @staticmethod
    def check_name(name: str | None) -> None:
        """Refuse a name that is not the name of one directory."""
        if name is not None and (Path(name).name != name or name in (".", "..", "")):
            raise UserError(f"'{name}' can't be the name of a run: it must be the name of one directory below 'out'")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """The directory of a run that exists."""
        run_dir = cls(Path(path))
        if not run_dir.config.is_file():
            raise UserError(f"'{path}' is not a run directory: there is no config.json in it")
        return run_dir

    def read(self) -> RunConfig:
        """The run's configuration."""
        from dora_rl.runtime.config import RunConfig

        try:
            return build(RunConfig, self.settings(), str(self.config))
        except ConfigError:
            self._check_schema()  # an older version of dora-rl had other settings
            raise

    def _check_schema(self) -> None:
        """Raise `SchemaError` if another version of dora-rl has written the ledger."""
        from dora_rl.ledger.ledger import LedgerError, SchemaError, connect

        try:
            connect(self.ledger).close()
        except SchemaError:
            raise
        except LedgerError:
            return  # missing or damaged: it does not say which version has written it

    def settings(self) -> dict[str, Any]:
        """The run's configuration as it was written, not validated."""
        settings: dict[str, Any] = self._document()["config"]
        return settings

    def write(self, config: RunConfig) -> None:
        """Continue with another configuration; of the section of the orchestrator only `steps` may differ."""
        self._write(config, self.base())

    def _write(self, config: RunConfig, base: Path) -> None:
        document = {"base": str(base), "config": json.loads(config.model_dump_json())}
        staged = self.config.with_suffix(".staged")
        staged.write_text(json.dumps(document, indent=1))
        sync(staged)
        staged.rename(self.config)
        sync(self.path)

    def base(self) -> Path:
        """The directory that relative paths of the configuration start from."""
        return Path(self._document()["base"])

    def store(self, config: RunConfig) -> WeightStore:
        """The published versions."""
        from dora_rl.weights.store import WeightStore

        if config.weights == "memory":
            return WeightStore.in_shared_memory(self.memory, keep=_ALL_VERSIONS)
        return WeightStore(self.weights, keep=_ALL_VERSIONS, durable=True)

    @property
    def memory(self) -> str:
        """Name of the run in shared memory: runs of one name in different directories are different runs."""
        path = self.path.resolve()
        return f"{path.name}-{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"

    def _document(self) -> Any:
        try:
            document = json.loads(self.config.read_text())
            assert isinstance(document["base"], str)
            assert isinstance(document["config"], dict)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AssertionError) as error:
            raise UserError(f"{self.config} can't be read: {error}") from error
        return document


def unwritable(out: Path, error: OSError) -> str:
    """The error message about an `out` directory that can't be written."""
    return f"can't write a run to '{out}': {error.strerror or error}; set 'out' to another directory (--out DIRECTORY)"


def parse(data: bytes) -> RunConfig:
    """The configuration as a worker receives it."""
    from dora_rl.runtime.config import RunConfig

    return build(RunConfig, json.loads(data))
