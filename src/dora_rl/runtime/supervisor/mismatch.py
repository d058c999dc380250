"""Checks the gap between the log-probs of engine and trainer, and ends a run that would learn from wrong ones.

The gap is measured on the tokens of a step that were sampled under the version that the step starts from
(`trainer.logprob_gap`). The first step of every run has only such tokens. A step without any measures nothing; there
the probe that each slot computes after loading a version is the check.

A step whose gap is too large is not published: the run ends, and resumes from the checkpoint before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dora_rl.core.errors import RunError
from dora_rl.core.types import StepId
from dora_rl.runtime.config import RunConfig

_TAIL = 10.0
"""The 99th percentile counts as a mean of a tenth of it: for rounding errors it is 3 to 6 times the mean."""
_FEW = 200
"""With fewer tokens than this the 99th percentile depends on one or two of them, and is ignored."""


class Limits(NamedTuple):
    """Mean absolute differences of log-probs."""

    warn: float
    stop: float


_USUAL = {"float32": Limits(0.002, 0.05), "float16": Limits(0.02, 0.2), "bfloat16": Limits(0.05, 0.3)}
"""Rounding gives 1e-6 to 1e-4 in float32, and a few hundredths at most in bfloat16. No rounding exceeds `stop`: an
architecture that was computed wrongly gave 1.7."""


class Mismatch:
    """The alarm of one run."""

    def __init__(self, config: RunConfig, notify: Callable[[str], None]) -> None:
        self._config = config
        self._notify = notify
        self.limits = limits(config)
        self._warned = 0.0
        """The gap of the last warning: a gap that stays is reported once, one that doubles is reported again."""

    def check(self, step: StepId, metrics: dict[str, float]) -> dict[str, float]:
        """The alarm as a metric: 0 none, 1 warning, 2 the run has to end; empty if the step measured nothing."""
        if "mismatch_gap" not in metrics:
            return {}
        gap = _gap(metrics)
        if not gap <= self.limits.stop:  # also true for NaN, and where 'stop' is below 'warn'
            return {"mismatch_alarm": 2.0}
        if gap <= self.limits.warn:
            return {"mismatch_alarm": 0.0}
        if gap > 2 * self._warned:
            self._warned = gap
            measured = f"{self._measured(step, metrics)}, above 'mismatch.warn' ({self.limits.warn:g})"
            self._notify(f"warning: {measured}; look at {_CAUSES}")
        return {"mismatch_alarm": 1.0}

    def refuse(self, step: StepId, metrics: dict[str, float]) -> None:
        """End the run if the gap of the step was too large."""
        if metrics.get("mismatch_alarm") == 2.0:
            raise RunError(
                f"{self._measured(step, metrics)}, above 'mismatch.stop' ({self.limits.stop:g}); the step is not "
                f"published and the checkpoint before it is kept: look at {_CAUSES}, then start a new run, or resume "
                "this one with --mismatch.stop VALUE if the gap is meant to be there"
            )

    def _measured(self, step: StepId, metrics: dict[str, float]) -> str:
        return (
            f"step {step + 1}: the log-probs of engine and trainer differ by {metrics['mismatch_gap']:.2g} on average "
            f"(99th percentile {metrics['mismatch_gap_p99']:.2g}) on {metrics['mismatch_tokens']:,.0f} tokens of the "
            f"same weights"
        )


_CAUSES = (
    "the model's architecture (is it a supported one?), 'model.dtype' and 'trainer.precision', "
    "'rollout.engine.kernels' or vLLM's arguments (quantisation, KV dtype), and anything that changes the engine's "
    "logits and not the trainer's"
)


def limits(config: RunConfig) -> Limits:
    """The limits that are set, or those of the coarsest dtype that engine or trainer computes in."""
    dtypes = {str(config.model.dtype), str(config.trainer.precision)}
    usual = max((_USUAL[dtype] for dtype in dtypes), key=lambda one: one.warn)
    return Limits(
        usual.warn if config.mismatch.warn is None else config.mismatch.warn,
        usual.stop if config.mismatch.stop is None else config.mismatch.stop,
    )


def _gap(metrics: dict[str, float]) -> float:
    mean, high = metrics["mismatch_gap"], metrics["mismatch_gap_p99"] / _TAIL
    return mean if metrics["mismatch_tokens"] < _FEW or not high > mean else high
