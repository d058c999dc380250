"""The folder of a run: the one place that knows what lies where.

config.json     the resolved configuration
ledger.db       what became of every prompt, and the event log that the run is resumed from
events.jsonl    the event log for people, one event with its commands a line
metrics.jsonl   figures of each step
samples.jsonl   some responses as text
activity.jsonl  where the time of slots and trainer went, in windows
weights/        published versions that are still held
checkpoints/    what training goes on from; `policy/` in each is for users
logs/           what the processes printed
tensorboard/    the figures for TensorBoard
report.html     the page about the run
.lock .trainer  held by the supervisor and by the trainer: there is one of each
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
from dora_rl.core.errors import UserError

if TYPE_CHECKING:
    # Only for types: what merely looks at a folder need not wait for torch.
    from dora_rl.runtime.config import RunConfig
    from dora_rl.weights.store import WeightStore

_ALL_VERSIONS = 1 << 30
"""The orchestrator says which versions are retired; the store frees none by itself."""


class RunDir:
    """Paths of a run."""

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
        self.logs = path / "logs"
        self.tensorboard = path / "tensorboard"
        self.report = path / "report.html"
        self.lock = path / ".lock"
        self.trainer_lock = path / ".trainer"

    @classmethod
    def create(cls, config: RunConfig, base: Path, name: str | None = None) -> RunDir:
        """A fresh folder under the config's `out`, with the config in it; `base` is where its other paths start."""
        cls.check_name(name)
        stem = name or time.strftime("%Y%m%d-%H%M%S")
        parent = Path(config.out)
        path = parent / stem
        for number in range(2, 1000):
            if not path.exists():
                break
            path = parent / f"{stem}-{number}"
        folder = cls(path)
        try:
            folder.logs.mkdir(parents=True)
            folder._write(config, base.resolve())
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise UserError(unwritable(parent, error)) from error
        return folder

    @staticmethod
    def check_name(name: str | None) -> None:
        """Refuse what is not the name of one folder."""
        if name is not None and (Path(name).name != name or name in (".", "..", "")):
            raise UserError(f"'{name}' can't be the name of a run: it is the name of one folder, under 'out'")

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """The folder of a run that exists."""
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise UserError(f"'{path}' is not the folder of a run: there is no config.json in it")
        return folder

    def read(self) -> RunConfig:
        """The run's configuration."""
        from dora_rl.runtime.config import RunConfig

        return build(RunConfig, self.settings(), str(self.config))

    def settings(self) -> dict[str, Any]:
        """The run's configuration as it was written, unchecked."""
        settings: dict[str, Any] = self._document()["config"]
        return settings

    def write(self, config: RunConfig) -> None:
        """Go on with another configuration; the orchestrator's part must stay as it was."""
        self._write(config, self.base())

    def _write(self, config: RunConfig, base: Path) -> None:
        document = {"base": str(base), "config": json.loads(config.model_dump_json())}
        staged = self.config.with_suffix(".staged")
        staged.write_text(json.dumps(document, indent=1))
        sync(staged)
        staged.rename(self.config)
        sync(self.path)

    def base(self) -> Path:
        """Where relative paths of the configuration start."""
        return Path(self._document()["base"])

    def store(self, config: RunConfig) -> WeightStore:
        """The published versions."""
        from dora_rl.weights.store import WeightStore

        if config.weights == "memory":
            return WeightStore.in_shared_memory(self.memory, keep=_ALL_VERSIONS)
        return WeightStore(self.weights, keep=_ALL_VERSIONS, durable=True)

    @property
    def memory(self) -> str:
        """Names the run among all of this machine: runs of one name in different folders are different runs."""
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
    """The sentence about a folder for runs that can't be written."""
    return f"no run can be written to '{out}': {error.strerror or error}; set 'out' to another folder (--out FOLDER)"


def parse(data: bytes) -> RunConfig:
    """The configuration as a process was told it."""
    from dora_rl.runtime.config import RunConfig

    return build(RunConfig, json.loads(data))
