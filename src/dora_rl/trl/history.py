"""The metrics of a run under TRL's names: what `trainer.state.log_history` and `on_log` have.

metrics.jsonl of the run has every step under our names; here, steps are averaged between two logs, as TRL does it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from dora_rl.trl.schedule import Schedule

if TYPE_CHECKING:
    from dora_rl.trl.config import GRPOConfig

NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "response_length/mean": "completions/mean_length",
    "response_length/min": "completions/min_length",
    "response_length/max": "completions/max_length",
    "response_length/truncated": "completions/clipped_ratio",
    "clip_fraction": "clip_ratio/region_mean",
    "reference_kl": "kl",
    "gradient_norm": "grad_norm",
    "timing_s/step": "step_time",
    "eval/held_out/reward": "eval_reward",
    "eval/held_out/accuracy": "eval_accuracy",
    "eval/held_out/response_length": "eval_completions/mean_length",
    "eval/held_out/failed": "eval_failed",
}
"""Our names of metrics, and TRL's; other metrics keep their names."""

_OWN = frozenset({"reward/mean", "reward/std", "reward/min", "reward/max"})
_PREFIX = "reward/"


def trl_name(name: str) -> str:
    """The name of a metric in TRL: `reward/FUNCTION/mean` is `rewards/FUNCTION/mean`."""
    if name.startswith(_PREFIX) and name not in _OWN:
        return f"rewards/{name.removeprefix(_PREFIX)}"
    return NAMES.get(name, name)


class History:
    """Decides when a log is due, and averages the metrics since the last one."""

    def __init__(self, args: GRPOConfig, schedule: Schedule) -> None:
        self._schedule = schedule
        self._first = args.logging_first_step
        self._every = (
            schedule.in_updates("logging_steps", args.logging_steps) if args.logging_strategy == "steps" else None
        )
        self._since: list[dict[str, float]] = []
        self._logged = 0

    def update(self, step: int) -> int:
        """The number of updates after a step, which TRL calls the global step."""
        return min((step + 1) * self._schedule.updates_per_step, self._schedule.updates)

    def epoch(self, update: int) -> float:
        """Passes over the rows so far."""
        per_epoch = self._schedule.updates_per_epoch
        return update / per_epoch if per_epoch else update / max(1, self._schedule.updates)

    def add(self, step: int, metrics: dict[str, float], *, asked: bool = False) -> dict[str, float] | None:
        """The log that is due after this step, if one is, or if a callback asked for it."""
        self._since.append({trl_name(name): value for name, value in metrics.items()})
        update = self.update(step)
        # A step may have several updates: a log is due when one of them was.
        due = self._every is not None and update // self._every > self._logged // self._every
        if not (due or asked or (self._first and self._logged == 0 and self._every is not None)):
            return None
        self._logged = update
        log = self._means()
        self._since.clear()
        return {**log, "epoch": self.epoch(update), "step": float(update)}

    def _means(self) -> dict[str, float]:
        names = dict.fromkeys(name for one in self._since for name in one)
        means = {name: statistics.fmean(one[name] for one in self._since if name in one) for name in names}
        return means | {name: value for name, value in self._since[-1].items() if name == "learning_rate"}
