"""Whole training runs against TRL's `GRPOTrainer` on this machine's CPU: the same model, data, rewards and settings.

    python -m benchmarks.training [--quick] [--jobs heavy,light,smollm2] [--repeats N]

The two sides alternate, and each ratio is taken within one repeat. TRL's settings are derived from the config of our
run, so the two can't differ. TRL generates with `transformers`, its default, and runs in a separate Python
environment ($TRL_PYTHON, `.venv-trl` by default). Both clocks run from the first version to the last, so imports,
loading, and saving weights for the evaluation count for neither side. Held-out accuracy is measured afterwards on the
saved weights of both sides, by the code of `dora-rl eval` and with the same random numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import BY_ACCURACY
from benchmarks.peers.trl_run import Settings
from benchmarks.processes import Watch
from benchmarks.progress import tick
from benchmarks.report import Ratio, aims, publish, shown
from benchmarks.running import command_of, lengths, read
from benchmarks.smollm2 import ensure
from dora_rl.apps import run_reader
from dora_rl.apps.train import read_config
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.toml"
SUMS = ROOT / "benchmarks" / "jobs" / "sums.toml"
TRL = os.environ.get("TRL_PYTHON", str(ROOT / ".venv-trl" / "bin" / "python"))
CORES = os.cpu_count() or 1
LIMIT = 1200.0
"""Time limit in seconds for one run of either side."""
SHUT_DOWN = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What both sides train."""

    config: Path
    settings: dict[str, object] = field(default_factory=dict)
    steps: tuple[int, int]
    """Steps of a quick run and of a full one."""
    points: int
    """Number of evaluations after the first one, at equal distances, the last at the end of the run."""
    micro_batch: int
    """Completions in one of TRL's passes. It hardly matters, since TRL pads all to the longest of the step."""
    aim: float
    """Aim for our trained tokens/s, as a multiple of TRL's."""


_CONSTANT: dict[str, object] = {
    "trainer.optimiser.schedule": "constant",  # TRL's decaying schedules end at zero, ours at a configured value
    "evaluation.every": 0,
    "logging.tensorboard": False,
    "logging.samples": 0,
    "threads": CORES,
}
JOBS = {
    "heavy": Job(config=QUICKSTART, settings=_CONSTANT, steps=(2, 12), points=3, micro_batch=16, aim=10.0),
    "light": Job(
        config=QUICKSTART,
        # With K = 3 the first four of twelve steps are trained on responses of the first version, which a light tail
        # does not make up for: accuracy was 15 points behind TRL's after equal steps.
        settings=_CONSTANT | {"data.params.tail": "light", "control.max_staleness": 1},
        steps=(3, 12),
        points=3,
        micro_batch=16,
        aim=2.0,
    ),
    "smollm2": Job(config=SUMS, settings={"threads": CORES}, steps=(1, 4), points=1, micro_batch=8, aim=2.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--repeats", type=int, default=0, help="2 by default, 1 in a quick run")
    parser.add_argument("--steps", type=int, default=0, help="steps of every job, in place of its own number")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting for both sides of every job"
    )
    given = parser.parse_args()
    if not Path(TRL).exists():
        reason = f"there is no {shown(TRL)}: `make .venv-trl/.installed` creates it"
        publish("training", [], {"not run": reason}, quiet=True)
        return
    repeats = given.repeats or (1 if given.quick else 2)
    names = given.jobs.split(",")
    figures: dict[str, Any] = {"cores": CORES, "repeats": repeats, "jobs": {}}
    ratios: list[Ratio] = []
    total = 3 * repeats * len(names)
    for name in names:
        job = JOBS[name]
        job = replace(job, settings=job.settings | dict(one.partition("=")[::2] for one in given.set))
        steps = given.steps or job.steps[0 if given.quick else 1]
        found = []
        for repeat in range(repeats):
            done = 3 * (repeats * names.index(name) + repeat)
            found.append(_repeat(name, job, steps, repeat, (done, total)))
        figures["jobs"][name] = {"settings": _shown_settings(job, steps), "repeats": found}
        ratios += _ratios(name, job, found)
    figures["ratios"] = [asdict(ratio) for ratio in ratios]
    publish("training", aims(ratios), figures)


def _repeat(name: str, job: Job, steps: int, repeat: int, progress: tuple[int, int]) -> dict[str, Any]:
    """Run both sides once and measure their accuracy; the side that runs first alternates between repeats."""
    done, total = progress
    sides = {"ours": _ours, "trl": _trl}
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {}
        for place, side in enumerate(list(sides)[:: 1 if repeat % 2 == 0 else -1]):
            tick(done + place, total, f"{name} {repeat + 1}: {side}")
            out = Path(folder) / side
            out.mkdir()
            result[side] = sides[side](job, steps, repeat, out)
        tick(done + 2, total, f"{name} {repeat + 1}: held-out accuracy of both")
        _evaluate(job, result)
    tick(done + 3, total, f"{name} {repeat + 1}: {_rate(result['ours']) / _rate(result['trl']):.1f} times TRL")
    return result


def _rate(side: dict[str, Any]) -> float:
    return float(side["tokens"] / side["seconds"])


def _settings(job: Job, steps: int) -> dict[str, object]:
    model = {"model.path": str(ensure().absolute())} if job.config == SUMS else {}
    saving = {"checkpoint.every": max(1, steps // job.points), "checkpoint.keep": 100}
    return job.settings | model | saving | {"control.steps": steps}


def _resolved(job: Job, steps: int) -> RunConfig:
    return read_config(job.config, [f"{key}={value}" for key, value in _settings(job, steps).items()])


def _shown_settings(job: Job, steps: int) -> dict[str, Any]:
    """The settings of both sides, as the page shows them."""
    config = _resolved(job, steps)
    shared: dict[str, Any] = dict(_for_trl(job, config, 0, [], Path()))
    shared = {key: value for key, value in shared.items() if key not in ("data", "out", "seed", "save")}
    for key in ("model", "reward"):
        shared[key] = shown(shared[key])
    return shared | {"mode": config.control.mode, "max_staleness": config.control.max_staleness}


# -- the two sides ----------------------------------------------------------------------------------------------


def _ours(job: Job, steps: int, seed: int, out: Path) -> dict[str, Any]:
    command = command_of(job.config, out, **_settings(job, steps), seed=seed, **{"data.seed": seed})
    _, wall, watch = _watched(command, out)
    folder = out / "run"
    found = read(folder)
    policies = run_reader.policies(RunDir.open(folder))
    some = sorted(length for group in lengths(folder) for length in group)
    return {
        "tokens": found.tokens,
        "seconds": found.seconds,
        "steps": found.steps,
        "wall": wall,
        "memory": watch.peak,
        "rewards": found.rewards,
        "median": statistics.median(some),
        "p99": some[int(len(some) * 0.99)],
        "points": [
            (version, found.published[version], str(path)) for version, path in sorted(policies.items()) if version
        ],
    }


def _trl(job: Job, steps: int, seed: int, out: Path) -> dict[str, Any]:
    config = _resolved(job, steps)
    saved = [step for step in range(1, steps + 1) if step % max(1, steps // job.points) == 0 or step == steps]
    rows = _rows(config, job.config.parent, seed)
    (out / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (out / "settings.json").write_text(json.dumps(_for_trl(job, config, seed, saved, out)))
    script = Path(__file__).parent / "peers" / "trl_run.py"
    output, wall, watch = _watched([TRL, str(script), str(out / "settings.json")], out)
    done = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("STEP ")]
    some = sorted(length for step in done for length in step["lengths"])
    return {
        "tokens": sum(some),
        "seconds": done[-1]["seconds"],
        "steps": len(done),
        "wall": wall,
        "memory": watch.peak,
        "rewards": [statistics.fmean(step["rewards"]) for step in done],
        "median": statistics.median(some),
        "p99": some[int(len(some) * 0.99)],
        "points": [(step, done[step - 1]["seconds"], str(out / f"step-{step}")) for step in saved],
        "versions": json.loads(next(line[9:] for line in output.splitlines() if line.startswith("VERSIONS "))),
    }


def _for_trl(job: Job, config: RunConfig, seed: int, save: list[int], out: Path) -> Settings:
    algorithm, optimiser = config.trainer.algorithm, config.trainer.optimiser
    file, _, function = config.reward.functions[0].partition(":")
    assert optimiser.schedule == "constant"
    assert not optimiser.weight_decay
    return Settings(
        model=config.model.path,
        data=str(out / "data.jsonl"),
        reward=f"{job.config.parent / file}:{function}",
        groups=config.control.groups_per_step,
        group_size=config.control.group_size,
        steps=config.control.steps or 0,
        max_tokens=config.control.max_response_tokens,
        learning_rate=optimiser.learning_rate,
        betas=optimiser.betas,
        loss=algorithm.name,
        clip=(algorithm.bounds.low, algorithm.bounds.high),
        micro_batch=min(job.micro_batch, config.control.groups_per_step * config.control.group_size),
        threads=CORES,
        seed=seed,
        save=save,
        out=str(out),
    )


def _rows(config: RunConfig, base: Path, seed: int) -> list[Any]:
    """The training rows of the source, shuffled by the seed."""
    file, _, function = config.data.source.partition(":")
    spec = importlib.util.spec_from_file_location("task", base / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = list(getattr(module, function)(**config.data.params))
    rows = rows[: len(rows) - config.data.held_out]
    random.Random(seed).shuffle(rows)
    return rows


def _watched(command: list[str], out: Path) -> tuple[str, float, Watch]:
    """Run one side. Returns its output, its total seconds, and the memory and processor time that it used."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(CORES),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    begin = time.monotonic()
    with (out / "stdout").open("w") as output, (out / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=environment)
        with Watch(process.pid) as watch:
            try:
                code = process.wait(LIMIT)
            except BaseException:
                process.terminate()
                process.wait(SHUT_DOWN)
                raise
    if code:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(out / 'stderr').read_text()[-2000:]}")
    return (out / "stdout").read_text(), time.monotonic() - begin, watch


# -- accuracy ---------------------------------------------------------------------------------------------------


def _evaluate(job: Job, result: dict[str, Any]) -> None:
    """Measure the accuracy at all points of both sides in one process; a curve begins with the initial model."""
    start = str(_resolved(job, 1).model.path)
    models = [start, *(path for side in ("ours", "trl") for *_, path in result[side]["points"])]
    options = [part for key, value in job.settings.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "benchmarks.held_out", str(job.config), *models, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"held-out accuracy: {done.stderr[-2000:]}")
    found = json.loads(next(line[9:] for line in done.stdout.splitlines() if line.startswith("ACCURACY ")))
    for side in ("ours", "trl"):
        points = result[side].pop("points")
        result[side]["curve"] = [(0, 0.0, found[start]["accuracy"])]
        result[side]["curve"] += [(step, seconds, found[path]["accuracy"]) for step, seconds, path in points]
        result[side]["interval_95"] = found[points[-1][2]]["interval_95"]
    result["prompts"] = found[start]["prompts"]


def seconds_to(curve: list[tuple[int, float, float]], goal: float) -> float | None:
    """Time at which a curve first reaches an accuracy, interpolated linearly between its points."""
    for (_, before, low), (_, after, high) in itertools.pairwise(curve):
        if low < goal <= high:
            return before + (after - before) * (goal - low) / (high - low)
    return None


def clear_rise(accuracy: float, prompts: int) -> float:
    """Smallest difference of two shares of right answers that counts: two standard deviations of chance."""
    return 2 * math.sqrt(2 * accuracy * (1 - accuracy) / prompts)


def _ratios(name: str, job: Job, repeats: list[dict[str, Any]]) -> list[Ratio]:
    speed, step, memory, goal = [], [], [], []
    for one in repeats:
        ours, theirs = one["ours"], one["trl"]
        speed.append(_rate(ours) / _rate(theirs))
        step.append(theirs["seconds"] / theirs["steps"] / (ours["seconds"] / ours["steps"]))
        memory.append(ours["memory"] / theirs["memory"])
        both = min(max(accuracy for *_, accuracy in side["curve"]) for side in (ours, theirs))
        if both - ours["curve"][0][2] < clear_rise(both, one["prompts"]):
            continue
        took = seconds_to(ours["curve"], both), seconds_to(theirs["curve"], both)
        one["goal"] = {"accuracy": both, "ours": took[0], "trl": took[1]}
        if took[0] and took[1]:
            goal.append(took[1] / took[0])
    found = [
        Ratio(name=f"{name}: trained tokens/s, times TRL's", values=speed, aim=job.aim),
        Ratio(name=f"{name}: TRL's seconds a step over ours", values=step),
        Ratio(name=f"{name}: our peak memory over TRL's", values=memory),
    ]
    if goal:
        name = f"{name}: TRL's seconds to the accuracy that both reach, over ours"
        found.append(Ratio(name=name, values=goal, noise=BY_ACCURACY))
    return found


if __name__ == "__main__":
    main()
