"""A pool of shared memory segments for bundles.

Fresh pages of shared memory cost many times what copying into them does, so an engine keeps its segments and writes to
one again after its importer has released it.

Invariants:
- a segment belongs to the process whose id is in its name; only that process reuses or removes it;
- a segment is reused only after its state is RELEASED;
- at most SPARE segments are kept; an engine removes its own when it is deleted, and the next engine that starts on the
  machine removes those of killed processes.
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

STATE = 12  # offset of the state in a segment
IN_USE, RELEASED = 0, 1
SPARE = 8
PREFIX = "dora-rl-kv-"


class SegmentPool:
    """The segments of one engine."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")  # noqa: S108
        self._folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
        self._made: dict[Path, mmap.mmap] = {}
        weakref.finalize(self, _remove, self._made, os.getpid())
        sweep(self._folder)

    def take(self, size: int) -> tuple[memoryview, Path]:
        """Return a segment of at least this size, and its path."""
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
                os.posix_fallocate(file, 0, size)  # a full disk is then an error here, not a crash while writing
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
    """Remove the segments of processes that no longer exist."""
    for path in folder.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not alive(int(owner)):
            path.unlink(missing_ok=True)
