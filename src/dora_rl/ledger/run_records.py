"""Run records: the inputs and outputs of a run, which the orchestrator does not need and the event log does not have.

    Configured         the resolved configuration that the run began with
    SettingChanged     a setting that has another value from now on
    FilesSeen          user code, data and model files as they were when a supervisor started
    CheckpointSaved    a checkpoint and the policy in it, file by file

Records are numbered and chained like events: a record that was changed or removed is detected, except at the end of the
chain. What the last records say can also be seen in the run's folder: in `config.json` and the checkpoints.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from dora_rl.core.file_digests import FileDigest
from dora_rl.core.types import Nanoseconds, Record, Version


class RunRecord(Record, frozen=True, kw_only=True, tag=True):
    """Base of all run records."""

    utc: str
    """The wall-clock time, as ISO 8601."""


class Configured(RunRecord, frozen=True, kw_only=True):
    """The configuration that the run began with."""

    base: str
    """The folder that relative paths of the configuration are resolved against."""
    config: dict[str, Any]
    """All settings, resolved."""
    digest: str
    """`core.file_digests.text_digest` of the JSON of both, with sorted keys."""


class SettingChanged(RunRecord, frozen=True, kw_only=True):
    """A setting has another value from now on."""

    key: str
    before: Any
    after: Any


class FilesSeen(RunRecord, frozen=True, kw_only=True):
    """Files that the run reads."""

    code: dict[str, FileDigest]
    """Rewards, environments and data sources that the user wrote, and the modules beside them that they import."""
    data: dict[str, FileDigest]
    model: dict[str, FileDigest]
    """The model that the run began with, if it is a folder or a file."""


class CheckpointSaved(RunRecord, frozen=True, kw_only=True):
    """A checkpoint is on disk."""

    name: str
    version: Version
    files: dict[str, FileDigest]
    """All files of its folder; those under `policy/` are the ones that users take away."""
    kept: tuple[str, ...]
    """All checkpoints that were on disk at that time."""


AnyRunRecord = Configured | SettingChanged | FilesSeen | CheckpointSaved


class RecordedAt(NamedTuple):
    """A run record, with its number and time in the ledger."""

    number: int
    at: Nanoseconds
    record: AnyRunRecord


def utc() -> str:
    """The current time in the format of run records."""
    return datetime.now(UTC).isoformat(timespec="seconds")
