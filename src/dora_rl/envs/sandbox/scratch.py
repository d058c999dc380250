"""Temporary folders of sandboxed runs, inspected and removed safely whatever hostile code leaves in them.

The owner of a folder holds a lock on it while it is in use; a folder without a lock was left by an owner that was
killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "dora-rl-sandbox-"
_NEW_SECONDS = 60


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "replace"))


def too_large(folder: Path, most_bytes: int, most_entries: int) -> bool:
    """Whether the folder exceeds a limit, or is too deep to be walked."""
    size, entries, folders = 0, 0, [str(folder)]
    try:
        while folders:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    entries += 1
                    if size > most_bytes or entries > most_entries:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    except FileNotFoundError:
        return False  # it is being changed: the next poll will see it
    except OSError:
        return True
    return False


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder that is locked while it is in use, so that `sweep` recognises abandoned ones."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def sweep() -> None:
    """Remove the folders of callers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _NEW_SECONDS:
                continue  # it may be new and not locked yet
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        # rm can remove trees that are too deep for Python.
        subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
