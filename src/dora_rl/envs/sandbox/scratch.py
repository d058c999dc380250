"""Folders of sandboxed runs: what hostile code leaves in one can't hurt whoever looks at it or removes it.

A folder is locked by its owner while it is in use; one that nobody holds was left by an owner that was killed.
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
    """The folder holds more than it may, or is so deep that it can't be walked."""
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
        return False  # it is being changed: the next look will see
    except OSError:
        return True
    return False


@contextmanager
def folder_of_a_run() -> Iterator[Path]:
    """A folder that is locked while it is in use, so that a left one can be told."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def sweep() -> None:
    """Remove what killed callers left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _NEW_SECONDS:
                continue  # perhaps just made, and not locked yet
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
        # Trees that are too deep for Python are not for rm.
        subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
