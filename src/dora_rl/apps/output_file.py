"""Files that a command writes when its work is done: what would keep them from being written is said before it."""

from __future__ import annotations

from pathlib import Path

from dora_rl.core.errors import UserError


def make_sure_of(file: Path, *, folders: bool = False) -> None:
    """That the file can be written; with `folders`, those above it are made.

    What it holds stays as it is; if it was not there, it is not there afterwards.
    """
    try:
        if folders:
            file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        file.open("a").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
