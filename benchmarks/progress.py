"""Progress lines of the benchmark's parts, which `benchmarks.bench` parses and people can read."""

from __future__ import annotations

import re
from typing import NamedTuple


class Progress(NamedTuple):
    """How much of the total is done, and what is being done."""

    done: int
    total: int
    text: str


def tick(done: int, total: int, text: str) -> None:
    print(f"progress {done}/{total} {text}", flush=True)


def parse(line: str) -> Progress | None:
    """The progress in a line, or None if it is another line."""
    found = re.fullmatch(r"progress (\d+)/(\d+) (.*)", line.strip())
    return None if found is None else Progress(int(found[1]), int(found[2]), found[3])
