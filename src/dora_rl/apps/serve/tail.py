"""New complete lines of a JSONL file that another process appends to.

Invariants:
- each complete line is given once, in order; half a line is given when the rest of it is there;
- a line that is no record is skipped, as `run_reader.lines` does;
- if the file was replaced or became shorter, reading starts over and `resets` counts that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dora_rl.apps.run_reader import parse_line

_CHUNK = 1 << 22


class JsonlTail:
    """Reads one growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        self.resets = 0

    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records since the last call, each with the offset of its line; consume all of them."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return  # not written yet, or a link
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if self._inode not in (None, status.st_ino) or status.st_size < self._offset:
                self._offset = 0
                self.resets += 1
            self._inode = status.st_ino
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    record = parse_line(line)
                    if record is not None:
                        yield self._offset, record
                    self._offset += len(line) + 1


def line_at(path: Path, offset: int) -> dict[str, Any] | None:
    """The record in the line that starts at this offset."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        file.seek(offset)
        return parse_line(file.readline())
