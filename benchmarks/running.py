"""Starts whole runs as a user does, and computes their figures from the files of the run directory."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.core.time_accounting import activity_name, occupancy

SECOND = 1e9


@dataclass(kw_only=True)
class Figures:
    """Figures of one run, from its first published version to its last."""

    seconds: float
    tokens: int
    """Trained response tokens."""
    steps: int
    occupancy: float
    """Share of the time in which slots could have worked that they did (`core.time_accounting`)."""
    trainer_busy: float
    """Seconds per step in which the trainer worked."""
    longest: float
    """Seconds of the longest trajectory of a step; mean over the steps."""
    context: float
    """Number of response tokens before a token; mean over all tokens."""
    live_versions: int
    migrations: int
    staleness: dict[str, float]
    idle: dict[str, float]
    evaluations: list[tuple[int, float, float]] = field(default_factory=list)
    """Version, seconds and accuracy of each evaluation."""
    published: dict[int, float] = field(default_factory=dict)
    """Seconds at which each version was published."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    ledger: float = 0.0
    """Processor seconds spent on writing the ledger."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


def run(config: Path, **settings: object) -> Figures:
    """The figures of `dora-rl train` in a temporary directory."""
    with finished(config, **settings) as folder:
        return read(folder)


@contextlib.contextmanager
def finished(config: Path, limit: float | None = None, /, **settings: object) -> Iterator[Path]:
    """The run directory of a finished run, which is removed when the context ends.

    A run that takes longer than `limit` seconds is killed, and `subprocess.TimeoutExpired` is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = command_of(config, Path(folder), **settings)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        yield Path(folder) / "run"


def command_of(config: Path, out: Path, **settings: object) -> list[str]:
    """The command line of `dora-rl train`."""
    options = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "dora_rl.apps.cli", "train", str(config), "--name", "run", "--out", str(out)]
    return [*command, *options]


def read(folder: Path) -> Figures:
    """The figures of a finished run."""
    metrics = list(_lines(folder / "metrics.jsonl"))
    steps = [line for line in metrics if "step" in line]
    activity = list(_lines(folder / "activity.jsonl"))
    published = {line["version"]: line["at"] for line in activity if line.get("note") == "published"}
    begin, end = published[min(published)], published[max(published)]
    asked = max(published)
    spent = _spent(activity, begin, end)
    slots = spent["slots"]
    total = sum(slots.values()) or 1
    staleness: Counter[str] = Counter()
    for line in steps:
        for key, share in line.items():
            if key.startswith("off_policy/staleness_"):
                staleness[key.rpartition("_")[2]] += share / len(steps)
    return Figures(
        seconds=(end - begin) / SECOND,
        tokens=round(sum(line["batch/response_tokens"] for line in steps)),
        steps=asked,
        occupancy=occupancy(slots),
        trainer_busy=(spent["trainer"]["train"] + spent["trainer"]["publish"]) / SECOND / asked,
        longest=_longest(folder / "events.jsonl"),
        context=_context([tokens for group in lengths(folder) for tokens in group]),
        live_versions=round(max(line["rollout/live_versions"] for line in steps)),
        migrations=round(sum(line["rollout/migrations"] for line in steps)),
        staleness=dict(sorted(staleness.items())),
        idle={key.removeprefix("idle: "): v / total for key, v in sorted(slots.items()) if key.startswith("idle")},
        evaluations=[
            (line["evaluation"], line["time"] - begin / SECOND, line["eval/held_out/accuracy"])
            for line in metrics
            if "evaluation" in line
        ],
        published={version: (at - begin) / SECOND for version, at in sorted(published.items())},
        rewards=[line["reward/mean"] for line in steps],
        ledger=max(line["timing_s/ledger"] for line in steps),
    )


def means(folder: Path, names: Iterable[str]) -> dict[str, float]:
    """Means of metrics over the steps that have them; a metric that no step has is absent."""
    steps = [line for line in _lines(folder / "metrics.jsonl") if "step" in line]
    values = {name: [line[name] for line in steps if name in line] for name in names}
    return {name: statistics.fmean(some) for name, some in values.items() if some}


def lengths(folder: Path) -> list[list[int]]:
    """Response tokens of the trajectories of each group, in the order of the groups' ids."""
    config = json.loads((folder / "config.json").read_text())["config"]
    size = int(config["control"]["group_size"])
    groups: dict[int, list[int]] = defaultdict(list)
    for line in _lines(folder / "events.jsonl"):
        event = line["event"]
        if event["event"] == "Generated":
            groups[event["trajectory"] // size].append(event["tokens"])
    return [groups[group] for group in sorted(groups)]


def _context(lengths: list[int]) -> float:
    return sum(tokens * tokens for tokens in lengths) / 2 / max(1, sum(lengths))


def _spent(activity: list[dict[str, Any]], begin: int, end: int) -> dict[str, Counter[str]]:
    """Time by label, for all slots together and for the trainer, in windows inside the measured part of the run."""
    spent: dict[str, Counter[str]] = defaultdict(Counter)
    for line in activity:
        if "who" not in line or line["start"] < begin or line["end"] > end or line["who"].startswith("evaluator"):
            continue
        who = "trainer" if line["who"] == "trainer" else "slots"
        for label, _, cause, nanoseconds in line["shares"]:
            spent[who][activity_name(label, cause)] += nanoseconds
    return spent


def _longest(events: Path) -> float:
    """Seconds of the longest trajectory of each step, from its start to its last token; mean over the steps."""
    config = json.loads(events.with_name("config.json").read_text())["config"]
    size = int(config["control"]["group_size"])
    begun: dict[int, int] = {}
    took: dict[int, float] = {}
    longest: list[float] = []
    for line in _lines(events):
        for command in line["commands"]:
            if command["command"] == "StartGroup":
                begun[command["group"]] = line["at"]
            elif command["command"] == "Apply":
                longest.append(max(took[group] for group in command["groups"]))
        event = line["event"]
        if event["event"] == "Generated":
            group = event["trajectory"] // size
            took[group] = max(took.get(group, 0.0), (line["at"] - begun[group]) / SECOND)
    return sum(longest) / max(1, len(longest))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
