"""Figures of a run: one line a step in `metrics.jsonl`, and where the time went in `activity.jsonl`.

Occupancy is the share of slot time that was not idle and not loading (`core.time_accounting`).
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity, TimeAccount, activity_name, occupancy
from dora_rl.core.types import SECOND, Nanoseconds, StepId, Version
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.evaluation import Evaluated
from dora_rl.runtime.supervisor.trajectory_store import GroupEntry
from dora_rl.runtime.transport.messages import SlotTime, TimeShare

_LONGEST_TAG = 80
"""Letters of the part of a tag that users have named."""


class Tracker(Protocol):
    """Where figures go besides the files."""

    def log(self, figures: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class MetricsRecorder:
    """The figures of one run."""

    def __init__(self, folder: RunDir, trackers: list[Tracker], now: Nanoseconds) -> None:
        self._metrics, self._samples, self._activity = map(_append, (folder.metrics, folder.samples, folder.activity))
        self._trackers = trackers
        self.trainer = TimeAccount(now, Activity(ActivityLabel.IDLE, cause=IdleCause(reason=IdleReason.STARTING)))
        self._trainer_window = now
        self.last: dict[str, float] = {}
        """Figures of the last step."""
        self.evaluations: list[Evaluated] = []
        self.time: Counter[str] = Counter()
        """Slot time by label, idle time by `idle: cause`, over the whole run."""
        self._step_time: Counter[str] = Counter()
        self.moved = 0
        """Requests that arrived."""
        self._step_moved = 0
        self.counted: dict[str, dict[str, int]] = {}
        self._reprefilled = 0
        """Tokens prefilled again, up to the last step."""
        self._pending: dict[StepId, dict[str, float]] = {}
        self._published_at = now
        self.steps = 0
        self.tokens = 0
        """Response tokens trained."""
        self.staleness: Counter[int] = Counter()
        self.most_live = 0
        self.step_seconds: list[float] = []

    # -- what is reported -------------------------------------------------------------------------------------

    def spent(self, name: str, message: SlotTime) -> None:
        """A window of a slot's time."""
        for share in message.shares:
            key = activity_name(share.label, share.cause)
            self.time[key] += share.spent
            self._step_time[key] += share.spent
        self._window(f"{name}/{message.slot}", message.start, message.end, list(message.shares))

    def arrived(self, requests: int) -> None:
        self.moved += requests
        self._step_moved += requests

    def stepped(self, step: StepId, metrics: dict[str, float], groups: list[GroupEntry]) -> None:
        """The trainer is through with a step."""
        ages = Counter(step - group.version for group in groups)
        self.staleness += ages
        tokens = sum(len(one.response) for group in groups for one in group.trajectories.values() if not one.failed)
        self.tokens += tokens
        ours = {f"off_policy/staleness_{age}": count / len(groups) for age, count in sorted(ages.items())}
        ours |= reward_figures([one.reward_components for group in groups for one in group.trajectories.values()])
        self._pending[step] = metrics | ours | {"batch/response_tokens": float(tokens)}

    def published(self, version: Version, now: Nanoseconds, live: int, verdicts: int, ledger_seconds: float) -> None:
        """A version is there: the step before it is over."""
        self.most_live = max(self.most_live, live)
        figures = self._pending.pop(version - 1, None)
        if figures is not None:
            seconds = (now - self._published_at) / SECOND
            self.steps += 1
            self.step_seconds.append(seconds)
            slot_time = sum(self._step_time.values()) or 1
            figures |= {
                "timing_s/step": seconds,
                "throughput/tokens_per_second": figures["batch/response_tokens"] / max(seconds, 1e-9),
                "rollout/occupancy": occupancy(self._step_time),
                "rollout/live_versions": float(live),
                "rollout/versions_together": float(self._together()),
                "rollout/migrations": float(self._step_moved),
                "rollout/reprefilled_tokens": float(self._reprefilled_since()),
                "rollout/failed_trajectories": float(verdicts),
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

    def evaluated(self, result: Evaluated, now: Nanoseconds) -> None:
        """An evaluation is over."""
        self.evaluations.append(result)
        figures = {
            "eval/held_out/accuracy": result.accuracy,
            "eval/held_out/reward": result.reward,
            "eval/held_out/response_length": result.mean_tokens,
            "eval/held_out/failed": float(result.failed),
        }
        self._write({"evaluation": result.version, "version": result.version, "time": round(now / SECOND, 3)}, figures)

    def sample(self, record: dict[str, Any]) -> None:
        """A response as text."""
        self._line(self._samples, record)

    def settle(self, now: Nanoseconds) -> None:
        """Write the trainer's window up to now."""
        self.trainer.settle(now)
        shares = [
            TimeShare(
                label=activity.label.value,
                version=activity.version,
                cause="" if activity.cause is None else activity.cause.reason.value,
                spent=spent,
            )
            for activity, spent in self.trainer.totals.items()
        ]
        self.trainer.totals.clear()  # each version has totals of its own: kept, they would grow with the run
        if now > self._trainer_window:
            self._window("trainer", self._trainer_window, now, shares)
            self._trainer_window = now

    def note(self, kind: str, now: Nanoseconds, **fields: Any) -> None:
        """Something that the page about the run shows: a move, a published version, a lost process."""
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
        """Tokens prefilled again since this was last asked."""
        before = self._reprefilled
        self._reprefilled = sum(figures.get("reprefilled", 0) for figures in self.counted.values())
        return self._reprefilled - before

    def _together(self) -> int:
        """Most versions that computed in one step of an instance, so far."""
        return max((figures.get("together", 0) for figures in self.counted.values()), default=0)

    def _window(self, who: str, start: Nanoseconds, end: Nanoseconds, shares: list[TimeShare]) -> None:
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


def reward_figures(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean and standard deviation of each part of the reward, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for one in parts:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    figures: dict[str, float] = {}
    for name in sorted(values):
        tag = _tag(name)
        number = 2
        while f"reward/{tag}/mean" in figures:  # names that differ only in what a tag can't have
            tag = f"{_tag(name)}_{number}"
            number += 1
        figures[f"reward/{tag}/mean"] = statistics.fmean(values[name])
        figures[f"reward/{tag}/std"] = statistics.pstdev(values[name])
    return figures


def _tag(name: str) -> str:
    """A name that users have given, as a part of a metric's tag: letters, digits and a few signs, and not too long."""
    steps = [re.sub(r"[^A-Za-z0-9_.-]+", "_", step).strip("_") for step in name.split("/")]
    return "/".join(step for step in steps if step)[:_LONGEST_TAG].rstrip("/") or "unnamed"


def _append(path: Path) -> IO[str]:
    """A file to add lines to; half a line that a crash has left goes first."""
    with path.open("a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
    return path.open("a", encoding="utf-8")
