"""Our own modes with light, medium and heavy tails of lengths: speed, occupancy, idle causes, staleness, lower bound.

    python -m benchmarks.tails [--quick] [--repeats N] [--steps N] [--tails light,medium,heavy] [--variants sync,...]

Learning is switched off (see jobs/chains.toml), so that every mode generates the same responses to the same prompts and
only the schedule differs. The tails have about the same mean. The lengths of the first synchronous run of each tail are
written to results/traces, from which `benchmarks.reality` predicts all cells.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from typing import Any

from benchmarks.compare import noise
from benchmarks.decode import peak_rate
from benchmarks.progress import tick
from benchmarks.report import RESULTS, Ratio, publish
from benchmarks.run import JOBS, bound
from benchmarks.running import Figures, finished, lengths, read
from dora_rl.apps.train import read_config

JOB = JOBS / "chains.toml"
TAILS = ("light", "medium", "heavy")
PROPORTIONAL = "dora K=4, proportional"
VARIANTS: dict[str, dict[str, object]] = {
    "sync": {"control.mode": "sync"},
    "one_step_off": {"control.mode": "one_step_off"},
    "partial K=4": {"control.mode": "partial", "control.max_staleness": 4},
    **{f"dora K={bound}": {"control.mode": "dora", "control.max_staleness": bound} for bound in (1, 2, 4, 8)},
    PROPORTIONAL: {"control.mode": "dora", "control.max_staleness": 4, "control.placement": "proportional"},
}
QUICK = ("sync", "one_step_off", "partial K=4", "dora K=1", "dora K=4")
STEPS = {True: 10, False: 40}
"""Steps of a quick and of a full run; of 40, the first and last ones, with fewer live versions, weigh little."""

Found = dict[str, list[dict[str, Figures]]]
"""By tail: for each repeat, the figures by variant."""


def staleness(variant: str) -> int:
    """The staleness bound of a variant."""
    return {"sync": 0, "one_step_off": 1}.get(variant) or int(str(VARIANTS[variant].get("control.max_staleness", 0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=0, help="2 by default, 1 in a quick run")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--tails", default=",".join(TAILS))
    parser.add_argument("--variants", default="")
    given = parser.parse_args()
    repeats = given.repeats or (1 if given.quick else 2)
    steps = given.steps or STEPS[given.quick]
    variants = given.variants.split("+") if given.variants else list(QUICK if given.quick else VARIANTS)
    tails = given.tails.split(",")
    asked = {tail: [one for one in variants if one != PROPORTIONAL or tail == "heavy"] for tail in tails}
    total = sum(map(len, asked.values())) * repeats + 1
    found: Found = {tail: [] for tail in tails}
    done = 0
    for repeat in range(repeats):
        for tail in tails:
            cells: dict[str, Figures] = {}
            # The order changes with each repeat, so that a drift of the machine favours no mode.
            for variant in asked[tail][repeat:] + asked[tail][:repeat]:
                tick(done, total, f"{tail} tail, {variant}, repeat {repeat + 1} of {repeats}")
                cells[variant] = _run(tail, variant, steps, write_trace=variant == "sync" and not repeat)
                done += 1
            found[tail].append({variant: cells[variant] for variant in asked[tail]})
    tick(done, total, "engine's best rates")
    config = read_config(JOB, [])
    peaks = {
        tail: peak_rate(config, repeats[0]["sync"].context) for tail, repeats in found.items() if "sync" in variants
    }
    tick(total, total, "done")
    publish("tails", [], _figures(found, peaks, steps))


def _run(tail: str, variant: str, steps: int, *, write_trace: bool) -> Figures:
    settings = VARIANTS[variant] | {"data.params.tail": tail, "control.steps": steps}
    with finished(JOB, **settings) as folder:
        if write_trace:
            _write_trace(tail, lengths(folder))
        return read(folder)


def _write_trace(tail: str, groups: list[list[int]]) -> None:
    """Write a trace in the format of `dora-rl plan`."""
    lines = [
        json.dumps({"response_tokens": tokens, "prompt_tokens": 7, "group": group})
        for group, some in enumerate(groups)
        for tokens in some
    ]
    (RESULTS / "traces").mkdir(parents=True, exist_ok=True)
    (RESULTS / "traces" / f"{tail}.jsonl").write_text("\n".join(lines) + "\n")


def _figures(found: Found, peaks: dict[str, float], steps: int) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for tail, repeats in found.items():
        traced = sorted(length for group in _trace(tail) for length in group)
        cells[tail] = {
            "median": statistics.median(traced),
            "p99": traced[int(len(traced) * 0.99)],
            "mean": statistics.fmean(traced),
            "repeats": [_with_bounds(cells, peaks.get(tail, 0.0)) for cells in repeats],
        }
    some = _ratios(found)
    ratios = [asdict(ratio) for ratio in some]
    config = read_config(JOB, [])
    batch = f"{config.control.groups_per_step} groups of {config.control.group_size}"
    about: dict[str, Any] = {"steps": steps, "batch": batch, "instances": config.rollout.instances}
    return about | {
        "cores": os.cpu_count(),
        "peak tokens/s of a core": peaks,
        "tails": cells,
        "ratios": ratios,
        "noise": noise([one.values for one in some]),
    }


def _with_bounds(cells: dict[str, Figures], peak: float) -> dict[str, Any]:
    result = {}
    for variant, one in cells.items():
        least = bound(cells["sync"], peak, staleness(variant)) if "sync" in cells else None
        result[variant] = asdict(one) | {"lower_bound": least}
        for unused in ("evaluations", "published", "rewards"):
            del result[variant][unused]
    return result


def _trace(tail: str) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for line in (RESULTS / "traces" / f"{tail}.jsonl").read_text().splitlines():
        one = json.loads(line)
        groups.setdefault(one["group"], []).append(one["response_tokens"])
    return list(groups.values())


def _ratios(found: Found) -> list[Ratio]:
    """Each variant over `sync`, and one placement rule over the other."""
    ratios = []
    for tail, repeats in found.items():
        variants = list(repeats[0])
        pairs = [(variant, "sync") for variant in variants if variant != "sync" and "sync" in variants]
        if PROPORTIONAL in variants and "dora K=4" in variants:
            pairs.append(("dora K=4", PROPORTIONAL))
        for one, other in pairs:
            values = [cells[one].tokens_per_second / cells[other].tokens_per_second for cells in repeats]
            ratios.append(Ratio(name=f"{tail} tail: {one} over {other}, trained tokens/s", values=values))
    return ratios


if __name__ == "__main__":
    main()
