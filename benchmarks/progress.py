"""How a part of the benchmark says how far it is: a line that `benchmarks.bench` reads, and people can."""

from __future__ import annotations

import re
from typing import NamedTuple


class Progress(NamedTuple):
    """So many of so many, and what was done last."""

    done: int
    total: int
    text: str


def tick(done: int, total: int, text: str) -> None:
    print(f"progress {done}/{total} {text}", flush=True)


def parse(line: str) -> Progress | None:
    """The progress that a line tells of, if it does."""
    found = re.fullmatch(r"progress (\d+)/(\d+) (.*)", line.strip())
    return None if found is None else Progress(int(found[1]), int(found[2]), found[3])
