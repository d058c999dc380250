"""Calls `TrainerCallback` objects of transformers from the callbacks of a run.

Invariants:
- a callback that overrides a method without an equivalent is refused when it is added;
- what a callback asks for in `control` is done or is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.api.callbacks import METHODS, STOP
from dora_rl.core.errors import UserError
from dora_rl.trl.history import History, trl_name

if TYPE_CHECKING:
    from dora_rl.trl.config import GRPOConfig

SUPPORTED = ("on_init_end", "on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")

_IMPOSSIBLE = ("should_save", "should_evaluate", "should_epoch_stop")
"""What a callback can ask transformers for, and not a run."""


def check(callback: object) -> object:
    """The callback, an instance if its class was given; refuse one that expects calls that never come."""
    from transformers import TrainerCallback

    made = callback() if isinstance(callback, type) else callback
    if not isinstance(made, TrainerCallback):
        if any(callable(getattr(made, name, None)) for name in METHODS):
            return made  # one of ours
        raise UserError(f"a callback must be a TrainerCallback of transformers, not {type(made).__name__}")
    for name in dir(TrainerCallback):
        if not name.startswith("on_") or name in SUPPORTED:
            continue
        if getattr(type(made), name) is not getattr(TrainerCallback, name):
            raise UserError(
                f"the callback {type(made).__name__} overrides {name}, which has no equivalent in dora-rl: there are "
                f"{', '.join(SUPPORTED)}"
            )
    return made


class Bridge:
    """One run, as the callbacks of transformers see it. It is a callback of the run itself."""

    def __init__(
        self, args: GRPOConfig, state: Any, callbacks: Iterable[Any], history: History, tokenizer: Any
    ) -> None:
        from transformers import TrainerControl

        self._args, self._state, self._callbacks = args, state, list(callbacks)
        self._history, self._tokenizer = history, tokenizer
        self.control = TrainerControl()

    def call(self, method: str, **values: Any) -> None:
        """Call a method of all callbacks."""
        for callback in self._callbacks:
            returned = getattr(callback, method)(
                self._args, self._state, self.control, processing_class=self._tokenizer, **values
            )
            self.control = self.control if returned is None else returned
        asked = [
            name for name in ("should_save", "should_evaluate", "should_epoch_stop") if getattr(self.control, name)
        ]
        if asked:
            raise UserError(
                f"a callback has set `control.{asked[0]}`, which dora-rl can't do at once: set 'save_steps' or "
                "'eval_steps', or use `control.should_training_stop`"
            )

    # -- called by the run --------------------------------------------------------------------------------------

    def on_step(self, step: int, metrics: dict[str, float]) -> object:
        self._state.global_step = self._history.update(step)
        self._state.epoch = self._history.epoch(self._state.global_step)
        self.call("on_step_end")
        log = self._history.add(step, metrics, asked=self.control.should_log)
        self.control.should_log = False
        if log is not None:
            self._state.log_history.append(log)
            self.call("on_log", logs=dict(log))
        return self._verdict()

    def on_eval(self, version: int, metrics: dict[str, float]) -> object:
        self.evaluated(version, {trl_name(name): value for name, value in metrics.items()})
        return self._verdict()

    def on_checkpoint(self, version: int, path: Path) -> object:
        self.call("on_save", checkpoint=path, version=version)
        return self._verdict()

    def evaluated(self, version: int, metrics: dict[str, float]) -> None:
        """Log the metrics of an evaluation, under TRL's names."""
        update = self._history.update(version - 1)
        epoch = self._history.epoch(update)
        self._state.log_history.append({**metrics, "epoch": epoch, "step": float(update)})
        self.call("on_evaluate", metrics={**metrics, "epoch": epoch})
        self._keep_best(metrics, update)

    def _keep_best(self, metrics: dict[str, float], update: int) -> None:
        """Only after the callbacks: they compare with the best of the evaluations before."""
        name = self._args.metric_for_best_model
        if name is None or "eval_reward" not in metrics:  # an evaluation under another prefix
            return
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise UserError(f"'metric_for_best_model' = {name!r} is not a metric: there are {', '.join(metrics)}")
        best, value = self._state.best_metric, metrics[key]
        if best is None or (value > best if self._args.greater_is_better else value < best):
            self._state.best_metric, self._state.best_global_step = value, update

    def _verdict(self) -> object:
        return STOP if self.control.should_training_stop else None
