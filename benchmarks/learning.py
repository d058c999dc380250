"""Does asynchrony cost learning? Held-out accuracy of many arms on the same seeds, at equal steps and equal seconds.

    python -m benchmarks.learning --seeds 10 --lanes 2          # the study; finished runs are not repeated
    python -m benchmarks.learning --report                      # tables and plots again, from the recorded runs
    python -m benchmarks.learning --only sync 'dora K=3' --jobs medium --hours 1

An arm is a row of `ARMS`: the settings in which it differs from the job's config file. Runs go seed by seed, all arms
of all jobs for each, so that a study that is interrupted is balanced. A finished run is appended at once to
`results/learning-runs.jsonl` and is never repeated there with the same job, arm, seed, steps and settings: delete the
file to measure another commit. Runs of arms that are no longer in the table stay in the file and are not reported.

With several lanes that many runs go at a time, each on its own cores. The analysis (`benchmarks.learning_analysis`,
`benchmarks.learning_report`) writes `results/learning.json` and the plots in `docs/`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from benchmarks import learning_report
from benchmarks.learning_analysis import Evaluation, Run, score
from benchmarks.machine import describe
from benchmarks.report import RESULTS
from benchmarks.running import finished, means, read
from dora_rl.apps.train import read_config
from dora_rl.core.errors import ConfigError

ROOT = Path(__file__).parent.parent
RUNS = RESULTS / "learning-runs.jsonl"
LIMIT = 1800.0
"""Seconds after which a run has failed."""
METRICS = ("off_policy/ess", "off_policy/kl", "clip_fraction", "correction/mean", "batch/groups_without_signal")
"""Metrics of a step whose mean is recorded if the run writes them."""

Settings = dict[str, object]


NEGATIVE = "trainer.algorithm.clip_negative"
DUAL_CLIP: Settings = {NEGATIVE: 3.0}
"""The default of runs with stale groups, written out, so that a change of the default is another arm."""
NO_DUAL_CLIP: Settings = {NEGATIVE: 1e9}


def _dora(staleness: int | str, admission: str = "just_in_time", **more: object) -> Settings:
    return {"control.max_staleness": staleness, "control.admission": admission, **more}


def _corrected(**settings: object) -> Settings:
    """A correction in place of the dual clip, with the loosest bound, and with the rule of admission that does nothing
    against staleness."""
    return _dora(7, "eager", **settings)


ARMS: dict[str, Settings] = {
    "sync": {"control.mode": "sync"},
    "dora K=1": _dora(1) | DUAL_CLIP,
    "dora K=3": _dora(3) | DUAL_CLIP,
    "dora K=7": _dora(7) | DUAL_CLIP,
    "dora auto": _dora("auto") | DUAL_CLIP,
    "dora K=3 eager": _dora(3, "eager") | DUAL_CLIP,
    "dora K=7 eager": _dora(7, "eager") | DUAL_CLIP,
    "partial K=3": {"control.mode": "partial", "control.max_staleness": 3, **DUAL_CLIP},
    "partial K=7": {"control.mode": "partial", "control.max_staleness": 7, **DUAL_CLIP},
    "dora K=3, no dual clip": _dora(3) | NO_DUAL_CLIP,
    "dora K=7, no dual clip": _dora(7) | NO_DUAL_CLIP,
    "K=7 eager, no dual clip": _dora(7, "eager") | NO_DUAL_CLIP,
    "dora K=3, decoupled PPO": _dora(3, **{"trainer.algorithm.correction": "token_truncate"}),
    "K=7 eager, decoupled PPO": _corrected(**{"trainer.algorithm.correction": "token_truncate"}),
    "K=7 eager, geometric mask": _corrected(**{"trainer.algorithm.correction": "geometric_mask"}),
    "K=7 eager, DPPO": _corrected(**{"trainer.algorithm.trust_region": "binary_tv"}),
    "K=7 eager, M2PO": _corrected(**{"trainer.algorithm.trust_region": "second_moment"}),
    "K=7 eager, ESS scaling": _corrected(**{"trainer.optimiser.ess_scaling": "true"}) | NO_DUAL_CLIP,
    "K=7 eager, negative veto": _corrected(**{"trainer.algorithm.veto": 0.1}) | NO_DUAL_CLIP,
}
"""The settings of each arm. An arm whose settings this version refuses is reported and left out."""
JOBS = {
    "quickstart": ROOT / "benchmarks" / "jobs" / "learning.toml",
    "medium": ROOT / "benchmarks" / "jobs" / "learning-medium.toml",
    "verified": ROOT / "benchmarks" / "jobs" / "verified.toml",
}
DEFAULT_JOBS = ("quickstart", "medium")
_console = Console(width=150)


class Planned(NamedTuple):
    """A run to be made."""

    job: str
    arm: str
    seed: int
    steps: int

    @property
    def key(self) -> str:
        return _key(self.job, self.arm, self.seed, self.steps, ARMS[self.arm], digest(JOBS[self.job]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 to this number - 1")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time, each on its own cores")
    parser.add_argument("--hours", type=float, help="start no run after this time")
    parser.add_argument("--only", nargs="+", metavar="ARM", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(DEFAULT_JOBS))
    parser.add_argument("--report", action="store_true", help="only analyse the recorded runs")
    arguments = parser.parse_args()
    if not arguments.report:
        wanted = plan(arguments.jobs, accepted(arguments.only), arguments.seeds, arguments.steps)
        study(wanted, arguments.lanes, arguments.hours)
    report(arguments.steps)


def report(steps: int) -> None:
    """Analyse the recorded runs of this many steps, in the order of the tables of jobs and arms."""
    recorded = {_key_of(one): one for one in load(RUNS)}
    seeds = {one.seed for one in recorded.values()}
    wanted = [Planned(job, arm, seed, steps).key for job in JOBS for arm in ARMS for seed in sorted(seeds)]
    runs = [recorded[key] for key in wanted if key in recorded]
    if len(runs) < len(recorded):
        _console.print(f"{len(recorded) - len(runs)} recorded runs have other settings or steps and are left out")
    if runs:
        learning_report.write(runs, _console)


# -- what to run --------------------------------------------------------------------------------------------------


def plan(jobs: Iterable[str], arms: Iterable[str], seeds: int, steps: int) -> list[Planned]:
    """All arms of all jobs for one seed, then for the next."""
    jobs, arms = list(jobs), list(arms)
    return [Planned(job, arm, seed, steps) for seed in range(seeds) for job in jobs for arm in arms]


def left(wanted: Iterable[Planned], recorded: Iterable[Run]) -> list[Planned]:
    """The runs that are not recorded."""
    done = {_key_of(one) for one in recorded}
    return [one for one in wanted if one.key not in done]


def digest(config: Path) -> str:
    """Of the file's settings: comments and layout don't count."""
    text = json.dumps(tomllib.loads(config.read_text()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _key_of(run: Run) -> str:
    return _key(run.job, run.arm, run.seed, run.steps, run.settings, run.config)


def _key(*parts: object) -> str:
    return json.dumps(parts, sort_keys=True)


def accepted(arms: Iterable[str]) -> list[str]:
    """The arms whose settings are valid."""
    found = []
    for arm in arms:
        try:
            read_config(JOBS["quickstart"], [f"{key}={value}" for key, value in ARMS[arm].items()])
        except ConfigError as error:
            _console.print(f"[red]{arm} is left out:[/] {escape(str(error))}")
        else:
            found.append(arm)
    return found


# -- the runs -----------------------------------------------------------------------------------------------------


def study(
    wanted: list[Planned], lanes: int, hours: float | None, run: Callable[[Planned], Run] | None = None
) -> list[Planned]:
    """Make the runs that are not recorded, append each to the file, and return those that failed."""
    planned = left(wanted, load(RUNS))
    _console.print(f"{len(wanted) - len(planned)} of {len(wanted)} runs are recorded; {len(planned)} are left")
    begin = time.monotonic()
    end = None if hours is None else begin + 3600 * hours
    failed: list[Planned] = []
    count = 0
    for one, future in _in_lanes(planned, lanes, end, run or execute):
        count += 1
        try:
            result = future.result()
        except Exception as error:
            failed.append(one)
            _console.print(
                f"[red]{one.job}, seed {one.seed}, {one.arm} failed:[/] {escape(str(error)[-1000:])}", highlight=False
            )
            continue
        if result is None:
            continue  # the time was over
        append(RUNS, result)
        minutes = (time.monotonic() - begin) / count * (len(planned) - count) / 60
        _console.print(f"{_line(result)}; {count} of {len(planned)}, about {minutes:.0f} min left", highlight=False)
    if failed:
        _console.print(f"[red]{len(failed)} runs failed[/]; they are tried again the next time")
    return failed


def _in_lanes(
    planned: list[Planned], lanes: int, end: float | None, run: Callable[[Planned], Run]
) -> Iterator[tuple[Planned, Future[Run | None]]]:
    """Start the runs in order, one per lane at a time, and yield each when it is finished."""
    free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for cores in lane_cores(lanes):
        free.put(cores)

    def begin() -> None:
        if lanes > 1:
            os.sched_setaffinity(0, free.get())  # of this thread, which the processes that it starts inherit

    def one_run(one: Planned) -> Run | None:
        return run(one) if end is None or time.monotonic() < end else None

    with ThreadPoolExecutor(lanes, initializer=begin) as pool:
        futures = {pool.submit(one_run, one): one for one in planned}
        try:
            for future in as_completed(futures):
                yield futures[future], future
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def lane_cores(lanes: int) -> list[list[int]]:
    """Which cores each lane has: equal numbers of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    each = len(cores) // lanes
    if not each:
        raise SystemExit(f"--lanes {lanes}: there are only {len(cores)} cores; use fewer lanes")
    return [cores[lane * each : (lane + 1) * each] for lane in range(lanes)]


def execute(one: Planned) -> Run:
    """Run `dora-rl train` on the cores of this thread."""
    config, settings = JOBS[one.job], ARMS[one.arm]
    load, commit = os.getloadavg()[0], str(describe()["commit"])
    shared = {"seed": one.seed, "data.seed": one.seed, "control.steps": one.steps}
    shared["trainer.optimiser.total_updates"] = one.steps
    with finished(config, LIMIT, **settings, **shared) as folder:
        figures = read(folder)
        averages = means(folder, METRICS)
    curve = tuple(
        Evaluation(version, round(figures.published[version], 3), accuracy)
        for version, _, accuracy in figures.evaluations
    )
    return Run(
        job=one.job,
        arm=one.arm,
        seed=one.seed,
        steps=one.steps,
        settings=settings,
        config=digest(config),
        commit=commit,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=round(load, 2),
        seconds=round(figures.seconds, 3),
        curve=curve,
        staleness=round(sum(int(age) * share for age, share in figures.staleness.items()), 4),
        histogram={age: round(share, 4) for age, share in figures.staleness.items()},
        tokens_per_second=round(figures.tokens_per_second, 1),
        means={name: round(value, 6) for name, value in averages.items()},
    )


def _line(run: Run) -> str:
    return (
        f"{run.job}, seed {run.seed}, {run.arm}: {run.curve[0].accuracy:.1%} -> {score(run.curve):.1%} "
        f"in {run.seconds:.0f} s, mean staleness {run.staleness:.2f}"
    )


# -- the file -----------------------------------------------------------------------------------------------------


def append(path: Path, run: Run) -> None:
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps(asdict(run)) + "\n")


def load(path: Path) -> list[Run]:
    """The recorded runs; a line that a crash cut off is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            found.append(Run(**(line | {"curve": tuple(Evaluation(*point) for point in line["curve"])})))
    return found


if __name__ == "__main__":
    main()
