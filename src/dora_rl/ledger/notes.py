"""What a run was made from and what it has made, beside the event log: notes that the orchestrator need not know.

    Configured         the resolved configuration that the run began with
    SettingChanged     a setting that is another one from now on
    FilesSeen          user code, data and model files as they were when a supervisor began
    CheckpointSaved    a checkpoint with the policy in it, file by file

Notes are numbered and chained like events: none can be changed or left out unnoticed, save the last ones. What the last
ones say is also seen from the run's folder: `config.json` and the checkpoints.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from dora_rl.core.file_digests import FileDigest
from dora_rl.core.types import Nanoseconds, Record, Version


class Note(Record, frozen=True, kw_only=True, tag=True):
    """Base of all notes."""

    utc: str
    """The wall-clock time, as ISO 8601."""


class Configured(Note, frozen=True, kw_only=True):
    """What the run began with."""

    base: str
    """The folder where relative paths of the configuration start."""
    config: dict[str, Any]
    """All settings, resolved."""
    digest: str
    """Of both, as `core.file_digests.bytes_digest` gives it of their JSON with sorted keys."""


class SettingChanged(Note, frozen=True, kw_only=True):
    """A setting is another one from now on."""

    key: str
    before: Any
    after: Any


class FilesSeen(Note, frozen=True, kw_only=True):
    """Files that the run reads."""

    code: dict[str, FileDigest]
    """Rewards, environments and data sources that the user wrote, with the modules beside them that they import."""
    data: dict[str, FileDigest]
    model: dict[str, FileDigest]
    """The model that the run began with, if it is a folder or a file."""


class CheckpointSaved(Note, frozen=True, kw_only=True):
    """A checkpoint is on disk."""

    name: str
    version: Version
    files: dict[str, FileDigest]
    """All files of its folder; those under `policy/` are what users take away."""
    kept: tuple[str, ...]
    """All checkpoints that were on disk then."""


AnyNote = Configured | SettingChanged | FilesSeen | CheckpointSaved


class Noted(NamedTuple):
    """One line of the notes."""

    number: int
    at: Nanoseconds
    note: AnyNote


def utc() -> str:
    """Now, as notes have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
