"""Reads a JSONL file that another process appends to, from where the last reading stopped.

Invariants:
- a line is read once, when it is complete; half a line is left for the next time;
- a line that can't be parsed, since a crash cut it short, is skipped;
- a file that got shorter is read on from its end: a resumed run removes at most half a line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dora_rl.apps.run_reader import parse_line


class TailedFile:
    """The records of a file that may grow, or may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def records(self) -> Iterator[dict[str, Any]]:
        """The records that were added since the last call."""
        for line in self.lines():
            record = parse_line(line)
            if record is not None:
                yield record

    def lines(self) -> Iterator[bytes]:
        """The complete lines that were added since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            self._position = min(self._position, file.seek(0, os.SEEK_END))
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line
