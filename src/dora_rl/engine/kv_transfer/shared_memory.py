"""Shared memory for bundles, used again and again.

Fresh pages of shared memory cost many times what copying into them does, so an engine keeps the segments that it made
and writes into one again when its importer has released it.

Invariants:
- a segment belongs to the process whose id is in its name; only that one takes it again or removes it;
- it is taken again only after its state says RELEASED;
- at most SPARE of them are kept; they go with their engine, and what a killed process left behind goes with the next
  engine that starts on the machine.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import uuid
import weakref
from pathlib import Path

from dora_rl.core.errors import BundleError
from dora_rl.core.os_processes import alive

STATE = 12  # where the state lies
IN_USE, RELEASED = 0, 1
SPARE = 8
PREFIX = "dora-rl-kv-"


class SegmentPool:
    """The shared memory of one engine."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108
        self._folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
        self._made: dict[Path, mmap.mmap] = {}
        weakref.finalize(self, _remove, self._made, os.getpid())
        sweep(self._folder)

    def take(self, size: int) -> tuple[memoryview, Path]:
        """A segment of at least this size, and its name."""
        free = [(len(memory), path) for path, memory in self._made.items() if memory[STATE] == RELEASED]
        fitting = min((one for one in free if one[0] >= size), default=None)
        if fitting is not None:
            path = fitting[1]
            return memoryview(self._made[path]), path
        if len(self._made) >= SPARE:
            for _, path in free:
                self._made.pop(path)
                path.unlink(missing_ok=True)
        return self._make(size)

    def _make(self, size: int) -> tuple[memoryview, Path]:
        path = self._folder / f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)  # so that a full disk is an error here, not a crash while writing
            else:
                os.ftruncate(file, size)
            memory = mmap.mmap(file, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise BundleError(f"no room for a bundle of {size:,} bytes in {self._folder}: {error.strerror}") from error
        finally:
            os.close(file)
        self._made[path] = memory
        return memoryview(memory), path


def _remove(made: dict[Path, mmap.mmap], owner: int) -> None:
    if os.getpid() == owner:
        for path in made:
            path.unlink(missing_ok=True)


def sweep(folder: Path = Path("/dev/shm")) -> None:  # noqa: S108
    """Remove what processes left behind that are no more."""
    for path in folder.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not alive(int(owner)):
            path.unlink(missing_ok=True)
