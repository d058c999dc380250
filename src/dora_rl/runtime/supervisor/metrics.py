"""Metrics of a run: one line a step in `metrics.jsonl`, responses as text in `samples.jsonl`, and how time was spent in
`activity.jsonl`. No decision depends on what is recorded here.

Occupancy is the share of slot time that was not idle and not loading (`core.time_accounting`).
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount, activity_name, occupancy
from dora_rl.core.types import SECOND, GroupId, InstanceId, Nanoseconds, StepId, Version
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.evaluation_client import EvaluationResult
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry
from dora_rl.runtime.transport.messages import SlotTime, TimeShare

_LONGEST_TAG = 80
"""Most characters of a tag section that users have named."""


class Tracker(Protocol):
    """A further destination of metrics besides `metrics.jsonl`."""

    def log(self, figures: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class CompletionsTracker(Protocol):
    """A tracker that also shows completions."""

    def log_completions(self, samples: Sequence[dict[str, Any]], step: int) -> None:
        """Take some responses of a step, as records of `samples.jsonl`, with the version that the step publishes."""


class RunObserver(Protocol):
    """Is told what is recorded, in the supervisor's process, as soon as it is written. It must not raise."""

    def sampled(self, sample: dict[str, Any]) -> None:
        """A response was written to `samples.jsonl`."""

    def published(self, version: Version, metrics: dict[str, float] | None) -> None:
        """A version was published, with the metrics of its step; None if no step led to it or they are not known."""

    def evaluated(self, version: Version, metrics: dict[str, float]) -> None:
        """The evaluation of a version is complete."""

    def checkpointed(self, version: Version, path: Path) -> None:
        """A checkpoint is complete."""


class MetricsRecorder:
    """The metrics of one run, since this supervisor started."""

    def __init__(
        self,
        run_dir: RunDir,
        trackers: list[Tracker],
        now: Nanoseconds,
        *,
        decode: Callable[[Sequence[int]], str],
        samples: int,
        completions_every: int = 0,
    ) -> None:
        """`samples` groups of each step are written as text, and sent to trackers every `completions_every` steps."""
        files = (run_dir.metrics, run_dir.samples, run_dir.activity)
        self._metrics, self._samples, self._activity = map(_append, files)
        self._checkpoints = run_dir.checkpoints
        self._trackers = trackers
        self.observers: list[RunObserver] = []
        self._decode = decode
        self._samples_per_step = samples
        self._completions_every = completions_every
        starting = IdleCause(reason=IdleReason.STARTING)
        self.trainer_time = TimeAccount(now, Activity(ActivityLabel.IDLE, cause=starting))
        """How the trainer spends its time; the trainer client switches it."""
        self._trainer_window = now
        self.last: dict[str, float] = {}
        """Metrics of the last step."""
        self.evaluations: list[EvaluationResult] = []
        self.time: Counter[str] = Counter()
        """Slot time by label, idle time by `idle: cause`."""
        self._step_time: Counter[str] = Counter()
        self.moved = 0
        """Requests that were migrated."""
        self._step_moved = 0
        self.engine_stats: dict[str, dict[str, int]] = {}
        """The last counters of each instance."""
        self._reprefilled = 0
        """Tokens that were prefilled again, up to the last step."""
        self._pending: dict[StepId, dict[str, float]] = {}
        """Metrics of steps that are trained and not published yet."""
        self._published_at = now
        self.steps = 0
        self.tokens = 0
        """Response tokens that were trained."""
        self.staleness: Counter[int] = Counter()
        self.most_live = 0
        self.step_seconds: list[float] = []

    # -- what is reported -------------------------------------------------------------------------------------

    def slot_time(self, instance: InstanceId, message: SlotTime) -> None:
        """Account for a window of a slot's time."""
        for share in message.shares:
            key = activity_name(share.label, share.cause)
            self.time[key] += share.spent
            self._step_time[key] += share.spent
        self._window(f"{instance}/{message.slot}", message.start, message.end, message.shares)

    def migrated(self, requests: int) -> None:
        """Count requests that arrived on another instance with their KV."""
        self.moved += requests
        self._step_moved += requests

    def step_trained(self, step: StepId, metrics: dict[str, float], groups: Mapping[GroupId, GroupEntry]) -> None:
        """Keep the metrics of a step until its version is published, and write some of its responses as text."""
        staleness = Counter(step - group.version for group in groups.values())
        self.staleness += staleness
        trajectories = [one for group in groups.values() for one in group.trajectories.values()]
        tokens = sum(one.length for one in trajectories if not one.failed)
        self.tokens += tokens
        ours = {f"off_policy/staleness_{age}": count / len(groups) for age, count in sorted(staleness.items())}
        latencies = [group.scored_at - group.admitted_at for group in groups.values()]
        if latencies:
            ours["timing_s/group_latency"] = statistics.fmean(latencies) / SECOND
        ours |= reward_metrics([one.reward_components for one in trajectories])
        self._pending[step] = metrics | ours | {"batch/response_tokens": float(tokens)}
        written = [
            sample
            for group, entry in list(groups.items())[: self._samples_per_step]
            for sample in self._write_samples(step, group, entry)
        ]
        if written and self._completions_every and step % self._completions_every == 0:
            for tracker in self._trackers:
                if isinstance(tracker, CompletionsTracker):
                    tracker.log_completions(written, step + 1)

    def published(
        self,
        version: Version,
        now: Nanoseconds,
        *,
        live: int,
        failed: int,
        without_signal: int,
        ledger_seconds: float,
        bound: int,
    ) -> None:
        """Write the metrics of the step that ended with this version."""
        self.most_live = max(self.most_live, live)
        figures = self._pending.pop(version - 1, None)
        if figures is not None:
            seconds = (now - self._published_at) / SECOND
            self.steps += 1
            self.step_seconds.append(seconds)
            slot_time = sum(self._step_time.values()) or 1
            figures |= {
                "off_policy/bound": float(bound),
                "timing_s/step": seconds,
                "throughput/tokens_per_second": figures["batch/response_tokens"] / max(seconds, 1e-9),
                "rollout/occupancy": occupancy(self._step_time),
                "rollout/live_versions": float(live),
                "rollout/versions_together": float(self._together()),
                "rollout/migrations": float(self._step_moved),
                "rollout/reprefilled_tokens": float(self._reprefilled_since()),
                "rollout/failed_trajectories": float(failed),
                "rollout/groups_without_signal": float(without_signal),
                "timing_s/ledger": ledger_seconds,
                **{
                    f"idle/{IdleReason(key.removeprefix('idle: ')).tag}": spent / slot_time
                    for key, spent in sorted(self._step_time.items())
                    if key.startswith("idle: ")
                },
            }
            self._write({"step": version - 1, "version": version, "time": round(now / SECOND, 3)}, figures)
            self.last = figures
        self._published_at = now
        self._step_time.clear()
        self._step_moved = 0
        for observer in self.observers:
            observer.published(version, figures)

    def evaluated(self, result: EvaluationResult, now: Nanoseconds) -> None:
        """Write the result of an evaluation."""
        self.evaluations.append(result)
        figures = {
            "eval/held_out/accuracy": result.accuracy,
            "eval/held_out/reward": result.reward,
            "eval/held_out/response_length": result.mean_tokens,
            "eval/held_out/failed": float(result.failed),
            "eval/held_out/responses": float(result.count),
        }
        self._write({"evaluation": result.version, "version": result.version, "time": round(now / SECOND, 3)}, figures)
        for observer in self.observers:
            observer.evaluated(result.version, figures)

    def checkpointed(self, name: str) -> None:
        """Tell the observers of a new checkpoint."""
        version = int(name.removeprefix("version-").partition(".")[0])
        for observer in self.observers:
            observer.checkpointed(version, self._checkpoints / name)

    def settle(self, now: Nanoseconds) -> None:
        """Write the trainer's window of time up to now."""
        shares = TimeShare.take(self.trainer_time, now)
        if now > self._trainer_window:
            self._window("trainer", self._trainer_window, now, shares)
            self._trainer_window = now

    def mark(self, kind: str, now: Nanoseconds, **fields: Any) -> None:
        """Record something that the timeline shows: a migration, a published version, a lost process, a new bound."""
        self._line(self._activity, {"note": kind, "at": now, **fields})

    def flush(self) -> None:
        for file in (self._metrics, self._samples, self._activity):
            with contextlib.suppress(OSError):  # a full disk: the lines stay in memory until there is room
                file.flush()

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._activity):
            with contextlib.suppress(OSError):
                file.close()
        for tracker in self._trackers:
            tracker.close()

    # -- inside -----------------------------------------------------------------------------------------------

    def _reprefilled_since(self) -> int:
        """Tokens that were prefilled again since the last call."""
        before = self._reprefilled
        self._reprefilled = sum(stats.get("reprefilled", 0) for stats in self.engine_stats.values())
        return self._reprefilled - before

    def _together(self) -> int:
        """The most versions that computed in one step of an instance so far."""
        return max((stats.get("together", 0) for stats in self.engine_stats.values()), default=0)

    def _write_samples(self, step: StepId, group: GroupId, entry: GroupEntry) -> list[dict[str, Any]]:
        """Write the responses of a group as text; returns the records."""
        written = []
        for trajectory, one in entry.trajectories.items():
            record = {
                "step": step,
                "group": group,
                "trajectory": trajectory,
                "version": entry.version,
                "versions": one.versions,
                "staleness": step - entry.version,
                "prompt": self._decode(entry.prompt),
                "response": self._decode(one.response),
                "tokens": one.length,
                "reward": one.reward,
                "reward_components": one.reward_components,
                "reward_notes": one.reward_notes,
                "stop": one.ended,
            }
            self._line(self._samples, record)
            written.append(record)
            for observer in self.observers:
                observer.sampled(record)
        return written

    def _window(self, who: str, start: Nanoseconds, end: Nanoseconds, shares: Sequence[TimeShare]) -> None:
        rows = [[share.label, share.version, share.cause, share.spent] for share in shares]
        self._line(self._activity, {"who": who, "start": start, "end": end, "shares": rows})

    def _write(self, head: dict[str, Any], figures: dict[str, float]) -> None:
        self._line(self._metrics, head | figures)
        self.flush()
        for tracker in self._trackers:
            tracker.log(figures, int(head["version"]))

    def _line(self, file: IO[str], record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def reward_metrics(components: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of each component of the reward, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for one in components:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    figures: dict[str, float] = {}
    for name in sorted(values):
        tag = _tag(name)
        number = 2
        while f"reward/{tag}/mean" in figures:  # names that differ only in characters that a tag can't have
            tag = f"{_tag(name)}_{number}"
            number += 1
        figures[f"reward/{tag}/mean"] = statistics.fmean(values[name])
        figures[f"reward/{tag}/std"] = statistics.pstdev(values[name])
    return figures


def _tag(name: str) -> str:
    """A user's name as a section of a metric's tag: letters, digits and a few signs, of limited length."""
    steps = [re.sub(r"[^A-Za-z0-9_.-]+", "_", step).strip("_") for step in name.split("/")]
    return "/".join(step for step in steps if step)[:_LONGEST_TAG].rstrip("/") or "unnamed"


def _append(path: Path) -> IO[str]:
    """Open a file for appending lines; half a line that a crash left is removed first."""
    with path.open("a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
    return path.open("a", encoding="utf-8")
