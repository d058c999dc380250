"""Run any number of random fault schedules: `python -m tests.soak --schedules 100000 --seed 0`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.progress import track
from rich.table import Table

from dora_rl.core.errors import DoraError
from tests.schedules import run_schedule

Outcome = tuple[int, str, int, int, int, dict[str, int]]


def run_one(seed: int) -> Outcome:
    """Seed, failure (empty if none), events, moves, resumes and faults of a schedule."""
    try:
        runtime = run_schedule(seed)
    except (AssertionError, DoraError, KeyError) as error:
        return seed, f"{type(error).__name__}: {error}"[:200], 0, 0, 0, {}
    return seed, "", runtime.events, runtime.checker.moves, runtime.checker.resumed, dict(runtime.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.schedules)
    faults: Counter[str] = Counter()
    events = moves = resumes = 0
    failures: list[tuple[int, str]] = []
    with ProcessPoolExecutor() as pool:
        for seed, failure, e, m, r, f in track(pool.map(run_one, seeds, chunksize=50), "schedules", total=len(seeds)):
            events, moves, resumes = events + e, moves + m, resumes + r
            faults.update(f)
            if failure:
                failures.append((seed, failure))
    table = Table("fault survived", "times")
    for name, count in sorted(faults.items()):
        table.add_row(name, f"{count:,}")
    console = Console()
    console.print(table)
    console.print(
        f"{len(seeds):,} schedules, {events:,} events, {moves:,} requests moved, {resumes:,} resumed, "
        f"{len(failures)} broken promises"
    )
    for seed, failure in failures[:20]:
        console.print(f"seed {seed}: {failure}", highlight=False, markup=False)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
