"""What a run's figures mean: whether it learns, what limits its speed, and what needs attention, each with the setting
to change.

Pure: figures in, sentences out. The live page shows them; thresholds and remedies are decided only here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dora_rl.apps.run_reader import Metrics
from dora_rl.apps.summary import ACCURACY, RECENT, REWARD, Summary, wilson
from dora_rl.apps.summary_table import MANY_WITHOUT_SIGNAL, duration
from dora_rl.core.activities import UNAVAILABLE, ActivityLabel, IdleReason
from dora_rl.core.time_accounting import activity_name
from dora_rl.core.types import Record

Level = Literal["alarm", "warning", "note"]

_BUSY = 0.8
"""Share of its time from which on a trainer, or all slots, are the limit by being busy."""
_FEW_STEPS = 6
"""Steps below which no trend is named."""
_STALL_STEPS, _STALL_SECONDS = 10, 60.0
"""A run is stalled if no version was published for this many median steps, and at least for these seconds."""
_ENTROPY, _CLIPPED, _ESS, _TRUNCATED, _REPREFILLED = 0.1, 0.2, 0.5, 0.2, 0.05
_FAILED, _MANY_FAILED = 0.01, 0.1

_REMEDIES: dict[IdleReason, tuple[str, str]] = {
    IdleReason.NO_PROMPTS: ("the data has no more prompts, or gives them too slowly", "data.source"),
    IdleReason.TRAINER: ("slots wait for the trainer: the staleness bound is reached", "trainer.ranks"),
    IdleReason.AHEAD: ("slots are ahead of the trainer: more groups would only wait for it", "trainer.ranks"),
    IdleReason.STRAGGLERS: ("slots wait for the last long responses of a batch", "control.max_staleness"),
    IdleReason.PUBLISH: ("slots wait for weights that are being published", "weights"),
    IdleReason.ROLLOUT: ("the trainer waits for responses", "rollout.instances"),
    IdleReason.DEADLINE: ("the trainer waits for old groups that are due", "control.max_staleness"),
    IdleReason.REWARD: ("the trainer waits for rewards", "reward.workers"),
    IdleReason.TOOL: ("requests wait for their environments", "environment.concurrency"),
    IdleReason.RESERVED: ("slots are emptied for a version that has none", "rollout.engine.slots"),
}
"""For each cause of idle time that limits a run: what it means, and the setting to change."""


class Learning(Record, frozen=True, kw_only=True):
    """Whether the run learns."""

    verdict: Literal["yes", "no change", "worse", "too early"]
    text: str
    accuracy_interval: tuple[float, float] | None
    """95%, of the last evaluation."""


class Binding(Record, frozen=True, kw_only=True):
    """What limits the speed of a run."""

    what: Literal["trainer", "rollout", "neither", "unknown"]
    text: str
    setting: str
    """The setting to change; empty if there is none."""


class Advisory(Record, frozen=True, kw_only=True):
    """Something that needs attention."""

    level: Level
    title: str
    text: str
    setting: str = ""


def learning(metrics: Metrics, samples: int) -> Learning:
    """Whether held-out accuracy, or else the reward, has changed by more than its noise.

    `samples` is the number of responses to each held-out prompt; they count as one, since they are correlated."""
    interval = None
    evaluated = sorted(metrics.evaluations.items())
    if len(evaluated) > 1:
        (first, before), (last, after) = evaluated[0], evaluated[-1]
        text = f"held-out accuracy {before[ACCURACY]:.1%} (v{first}) to {after[ACCURACY]:.1%} (v{last})"
        ranges = [
            wilson(one[ACCURACY], one["eval/held_out/responses"] / samples)
            for one in (before, after)
            if one.get("eval/held_out/responses")
        ]
        if len(ranges) == 2:
            interval = ranges[1]
            text += f", 95% interval {interval[0]:.1%} to {interval[1]:.1%}"
            apart = ranges[0][1] < ranges[1][0] or ranges[1][1] < ranges[0][0]
        else:
            apart = abs(after[ACCURACY] - before[ACCURACY]) > 0.1
        if apart:
            return Learning(
                verdict="yes" if after[ACCURACY] > before[ACCURACY] else "worse", text=text, accuracy_interval=interval
            )
    rewards = [one[REWARD] for one in metrics.steps.values() if math.isfinite(one.get(REWARD, math.nan))]
    if len(rewards) < _FEW_STEPS:
        return Learning(verdict="too early", text=f"{len(rewards)} steps so far", accuracy_interval=interval)
    third = len(rewards) // 3
    early, late = rewards[:third], rewards[-third:]
    change = statistics.fmean(late) - statistics.fmean(early)
    noise = math.sqrt(sum(statistics.variance(some) / len(some) if len(some) > 1 else 0.0 for some in (early, late)))
    text = f"mean reward {statistics.fmean(early):.3f} in the first third, {statistics.fmean(late):.3f} in the last"
    if abs(change) <= 2 * noise:
        return Learning(verdict="no change", text=f"{text}: within the noise", accuracy_interval=interval)
    return Learning(verdict="yes" if change > 0 else "worse", text=text, accuracy_interval=interval)


def binding(slots: Mapping[str, float], trainer: Mapping[str, float], occupancy: float) -> Binding:
    """What limits the speed, from shares of the time of slots and trainer by activity name."""
    if not slots or not trainer:
        return Binding(what="unknown", text="nothing was trained yet", setting="")
    training = trainer.get(ActivityLabel.TRAIN, 0.0) + trainer.get(ActivityLabel.PUBLISH, 0.0)
    if training >= _BUSY:
        text = f"the trainer computes {training:.0%} of the time; slots are occupied {occupancy:.0%}"
        return Binding(what="trainer", text=text, setting="trainer.ranks")
    if occupancy >= _BUSY:
        text = f"slots are occupied {occupancy:.0%}; the trainer computes {training:.0%} of the time"
        return Binding(what="rollout", text=text, setting="rollout.instances")
    waits = max(_causes(trainer).items(), key=lambda it: it[1], default=None)
    idle = max(_causes(slots).items(), key=lambda it: it[1], default=None)
    worst = max((one for one in (waits, idle) if one is not None), key=lambda it: it[1], default=None)
    if worst is None or worst[1] < 0.05:
        text = f"slots are occupied {occupancy:.0%}, the trainer {training:.0%}"
        return Binding(what="neither", text=text, setting="")
    meaning, setting = _REMEDIES[worst[0]]
    what: Literal["trainer", "rollout"] = (
        "trainer" if worst[0] in (IdleReason.TRAINER, IdleReason.AHEAD, IdleReason.PUBLISH) else "rollout"
    )
    whose = "of the trainer's time" if worst is waits else "of the slots' time"
    return Binding(what=what, text=f"{meaning} ({worst[1]:.0%} {whose})", setting=setting)


def _causes(shares: Mapping[str, float]) -> dict[IdleReason, float]:
    """Idle shares by cause, without those in which nothing could have been done."""
    named = {reason: shares.get(activity_name(ActivityLabel.IDLE, reason), 0.0) for reason in IdleReason}
    return {reason: share for reason, share in named.items() if share and reason not in UNAVAILABLE}


def advisories(
    summary: Summary, metrics: Metrics, *, trajectories: int, since_version: float, quiet: float
) -> list[Advisory]:
    """What needs attention, the most serious first. `since_version` are seconds of the run since the last version was
    published, `quiet` seconds since the run was last heard of, `trajectories` all that have ended."""
    steps = list(metrics.steps.values())
    found = [
        *_stalled(summary, since_version, quiet),
        *_numbers(summary, steps),
        *_failures(summary, trajectories),
        *_policy(steps),
        *_waste(summary, steps),
    ]
    ranks: Sequence[Level] = ("alarm", "warning", "note")
    return sorted(found, key=lambda one: ranks.index(one.level))


def _stalled(summary: Summary, since_version: float, quiet: float) -> list[Advisory]:
    if summary.state != "running" or not summary.steps:
        return []
    limit = max(_STALL_SECONDS, _STALL_STEPS * summary.step_seconds)
    if max(since_version, quiet) <= limit:
        return []
    text = f"no version for {duration(max(since_version, quiet))}; a step takes {duration(summary.step_seconds)}"
    return [Advisory(level="alarm", title="stalled", text=f"{text}: see the logs under System")]


def _numbers(summary: Summary, steps: Sequence[Mapping[str, Any]]) -> list[Advisory]:
    found = []
    if steps and not all(math.isfinite(_number(steps[-1], name)) for name in ("loss", "gradient_norm")):
        text = f"step {steps[-1]['step']} has a loss or gradient that is no number"
        found.append(
            Advisory(level="alarm", title="not a number", text=text, setting="trainer.optimiser.learning_rate")
        )
    if summary.alarms:
        text = f"engine and trainer differ by up to {max(summary.alarms.values()):.1e} in {len(summary.alarms)} steps"
        found.append(Advisory(level="alarm", title="log-prob gap", text=text, setting="rollout.engine.kernels"))
    return found


def _failures(summary: Summary, trajectories: int) -> list[Advisory]:
    found = []
    failed = sum(summary.failed.values())
    share = failed / max(1, trajectories)
    if share > _FAILED:
        reason = next(iter(summary.failed))
        text = f"{failed} of {trajectories} trajectories ({share:.1%}), most often: {reason}"
        level: Level = "alarm" if share > _MANY_FAILED else "warning"
        found.append(Advisory(level=level, title="failed trajectories", text=text))
    if summary.restarts:
        names = ", ".join(f"{name} {count}x" for name, count in list(summary.restarts.items())[:5])
        found.append(Advisory(level="note", title="processes restarted", text=names))
    return found


def _policy(steps: Sequence[Mapping[str, Any]]) -> list[Advisory]:
    if len(steps) < _FEW_STEPS:
        return []
    found = []
    start, now = _mean(steps[:3], "entropy"), _mean(steps[-RECENT:], "entropy")
    if start is not None and now is not None and now < _ENTROPY * start:
        text = f"entropy fell from {start:.3g} to {now:.3g}: the policy hardly varies any more"
        setting = "trainer.algorithm.entropy_coefficient"
        found.append(Advisory(level="warning", title="entropy collapse", text=text, setting=setting))
    clipped = _mean(steps[-RECENT:], "clip_fraction")
    if clipped is not None and clipped > _CLIPPED:
        text = f"{clipped:.0%} of the tokens are clipped: updates are large or responses stale"
        setting = "trainer.optimiser.learning_rate"
        found.append(Advisory(level="warning", title="clip fraction", text=text, setting=setting))
    ess = _mean(steps[-RECENT:], "off_policy/ess")
    if ess is not None and ess < _ESS:
        text = f"the effective sample size is {ess:.0%} of the batch: responses are far off policy"
        found.append(Advisory(level="warning", title="off policy", text=text, setting="control.max_staleness"))
    return found


def _waste(summary: Summary, steps: Sequence[Mapping[str, Any]]) -> list[Advisory]:
    found = []
    truncated = _mean(steps[-RECENT:], "response_length/truncated")
    if truncated is not None and truncated > _TRUNCATED:
        text = f"{truncated:.0%} of the responses reach the token limit"
        setting = "control.max_response_tokens"
        found.append(Advisory(level="warning", title="truncated responses", text=text, setting=setting))
    again = summary.reprefilled / max(1, summary.tokens)
    if again > _REPREFILLED:
        text = f"{summary.reprefilled:,} tokens were prefilled again ({again:.0%} of those trained): KV memory is short"
        found.append(Advisory(level="warning", title="KV pressure", text=text, setting="rollout.engine.kv_bytes"))
    replaced = sum(summary.without_signal.values()) / max(1, summary.groups)
    flat = _ratio(steps[-RECENT:], "batch/groups_without_signal", "batch/groups")
    if max(replaced, flat) > MANY_WITHOUT_SIGNAL:
        text = f"{max(replaced, flat):.0%} of the groups have equal rewards and teach nothing"
        setting = "data.source" if replaced >= flat else "control.dynamic_sampling"
        found.append(Advisory(level="warning", title="groups without signal", text=text, setting=setting))
    return found


def _number(figures: Mapping[str, Any], name: str) -> float:
    """0 if it is not recorded; NaN if it was recorded as none."""
    value = figures.get(name, 0.0)
    return math.nan if value is None else float(value)


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [one[name] for one in steps if one.get(name) is not None and math.isfinite(one[name])]
    return statistics.fmean(found) if found else None


def _ratio(steps: Sequence[Mapping[str, Any]], part: str, whole: str) -> float:
    return (_mean(steps, part) or 0.0) / max(1e-9, _mean(steps, whole) or 1.0)
