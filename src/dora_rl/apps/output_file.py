"""Checks before a command starts its work that its output file can be written at the end."""

from __future__ import annotations

from pathlib import Path

from dora_rl.core.errors import UserError


def check_writable(file: Path, *, folders: bool = False) -> None:
    """Raise an error if the file can't be written; with `folders`, create its parent folders.

    An existing file keeps its content; a file that did not exist does not exist afterwards.
    """
    try:
        if folders:
            file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
