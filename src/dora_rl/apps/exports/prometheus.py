"""A run in Prometheus' text exposition format (version 0.0.4), for a server to answer `/metrics` with.

Counters cover the whole run, however often it was resumed, so they never fall while a run goes on. Labels have few
values: activities, causes, workers, outcomes, names of metrics. Reasons of failures, which are free text, are not
labels; `dora-rl export --to csv` has them.

Invariants:
- reading changes nothing in the run;
- `RunMetrics` reads each line of the run's files once, so a scrape costs as much as the run has written since the last
  one, and a few counts over the ledger's tables;
- every sample belongs to a family with a HELP and a TYPE, which come before it; no sample is there twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from dora_rl.apps.run_reader import is_running, open_ledger
from dora_rl.apps.summary import worker_id
from dora_rl.apps.tail import TailedFile
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.types import SECOND
from dora_rl.runtime.run_dir import RunDir

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_HEAD = ("step", "evaluation", "version", "time")
"""Keys of a line of metrics that are not metrics."""
_GROUPS = """
SELECT count(*), count(failure), count(no_signal), count(published_at)
FROM groups LEFT JOIN steps ON steps.step = groups.step
"""
_STALENESS = """
SELECT groups.step - version, count(*) FROM groups JOIN steps ON steps.step = groups.step
WHERE published_at IS NOT NULL GROUP BY 1 ORDER BY 1
"""
_TRAJECTORIES = """
SELECT count(tokens), coalesce(sum(tokens), 0), count(failed),
    coalesce(sum(tokens) FILTER (WHERE failed IS NULL AND published_at IS NOT NULL), 0)
FROM trajectories JOIN groups ON groups.id = "group" LEFT JOIN steps ON steps.step = groups.step
"""


class Sample(NamedTuple):
    """One value."""

    value: float
    labels: Mapping[str, str] = {}  # never changed


class Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: list[Sample]


class RunMetrics:
    """The metrics of one run; keeps what it has read between two scrapes."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._metrics = TailedFile(folder.metrics)
        self._activity = TailedFile(folder.activity)
        self._step: dict[str, Any] = {}
        self._evaluation: dict[str, Any] = {}
        self._slots: Counter[tuple[str, str]] = Counter()
        self._trainer: Counter[tuple[str, str]] = Counter()
        self._lost: Counter[str] = Counter()

    def text(self) -> str:
        """The exposition as of now."""
        self._read()
        name = self._folder.path.resolve().name
        return "".join(exposition(self._families(), {"run": name}))

    def _read(self) -> None:
        for record in self._metrics.records():
            if "evaluation" in record:
                self._evaluation = max(self._evaluation, record, key=lambda it: it.get("evaluation", -1))
            elif record.get("step", -1) >= self._step.get("step", -1):  # a step that was trained again has two lines
                self._step = record
        for record in self._activity.records():
            if "shares" in record:
                account = self._trainer if record["who"] == "trainer" else self._slots
                for label, _, cause, spent in record["shares"]:
                    account[label, cause] += spent
            elif record.get("note") == "lost":
                self._lost[worker_id(record["who"])] += 1

    def _families(self) -> Iterator[Family]:
        settings = self._folder.settings()
        control = settings["control"]
        about = {
            "mode": control["mode"],
            "max_staleness": str(control["max_staleness"]),
            "model": str(settings.get("model", {}).get("path", "")),
        }
        yield Family("dora_rl_run_info", "gauge", "The run's mode, bound and model; always 1.", [Sample(1, about)])
        yield Family(
            "dora_rl_running", "gauge", "1 while a supervisor runs the run.", [Sample(is_running(self._folder))]
        )
        if control["steps"] is not None:
            yield Family("dora_rl_steps_asked", "gauge", "Steps that the run is asked for.", [Sample(control["steps"])])
        if self._folder.ledger.exists():
            yield from self._ledger_families()
        yield _time("dora_rl_slot_seconds", "Time of all slots by activity; idle time by its cause.", self._slots)
        yield _time(
            "dora_rl_trainer_seconds", "Time of the trainer by activity; idle time by its cause.", self._trainer
        )
        lost = [Sample(count, {"worker": worker}) for worker, count in sorted(self._lost.items())]
        yield Family("dora_rl_processes_lost", "counter", "Processes that were lost, by worker.", lost)
        yield Family("dora_rl_step_metric", "gauge", "The metrics of the last step.", _values(self._step))
        if self._evaluation:
            version = [Sample(self._evaluation["evaluation"])]
            yield Family("dora_rl_evaluated_version", "gauge", "The last version that was evaluated.", version)
        yield Family("dora_rl_evaluation_metric", "gauge", "The last evaluation.", _values(self._evaluation))

    def _ledger_families(self) -> Iterator[Family]:
        with open_ledger(self._folder) as connection:
            (steps,) = connection.execute("SELECT count(published_at) FROM steps").fetchone()
            admitted, failed, without_signal, trained = connection.execute(_GROUPS).fetchone()
            generated, tokens, failures, trained_tokens = connection.execute(_TRAJECTORIES).fetchone()
            (moved,) = connection.execute("SELECT count(*) FROM moves WHERE arrived = 1").fetchone()
            staleness = connection.execute(_STALENESS).fetchall()
        yield Family("dora_rl_steps", "counter", "Steps whose version is published.", [Sample(steps)])
        yield Family("dora_rl_groups_admitted", "counter", "Groups that were admitted.", [Sample(admitted)])
        outcomes = {"trained": trained, "failed": failed, "without_signal": without_signal}
        ended = [Sample(count, {"outcome": outcome}) for outcome, count in outcomes.items()]
        yield Family("dora_rl_groups_ended", "counter", "Groups that have ended, by outcome.", ended)
        live = [Sample(admitted - trained - failed - without_signal)]
        yield Family("dora_rl_groups_untrained", "gauge", "Groups that are admitted and have not ended.", live)
        by_staleness = [Sample(count, {"staleness": str(age)}) for age, count in staleness]
        yield Family("dora_rl_groups_trained", "counter", "Trained groups, by staleness.", by_staleness)
        yield Family("dora_rl_trajectories_generated", "counter", "Complete responses.", [Sample(generated)])
        yield Family("dora_rl_tokens_generated", "counter", "Tokens of complete responses.", [Sample(tokens)])
        yield Family("dora_rl_tokens_trained", "counter", "Trained response tokens.", [Sample(trained_tokens)])
        yield Family("dora_rl_trajectories_failed", "counter", "Trajectories that failed.", [Sample(failures)])
        yield Family("dora_rl_requests_moved", "counter", "Requests that arrived after a move.", [Sample(moved)])


def prometheus_text(folder: RunDir) -> str:
    """The metrics of a run in text exposition format, from its files alone."""
    return RunMetrics(folder).text()


def exposition(families: Iterable[Family], labels: Mapping[str, str]) -> Iterator[str]:
    """The lines of some families; all their samples have these labels, too. A counter's name gets the suffix _total."""
    for family in families:
        if not family.samples:
            continue
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        yield f"# HELP {name} {_escape_help(family.help)}\n# TYPE {name} {family.kind}\n"
        for sample in family.samples:
            pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in {**labels, **sample.labels}.items())
            yield f"{name}{{{pairs}}} {_number(sample.value)}\n"


def _time(name: str, help_: str, spent: Mapping[tuple[str, str], int]) -> Family:
    samples = [
        Sample(time / SECOND, {"activity": label, "cause": cause if label == ActivityLabel.IDLE else ""})
        for (label, cause), time in sorted(spent.items())
    ]
    return Family(name, "counter", help_, samples)


def _values(record: Mapping[str, Any]) -> list[Sample]:
    return [
        Sample(value, {"metric": name})
        for name, value in sorted(record.items())
        if name not in _HEAD and isinstance(value, int | float)
    ]


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
