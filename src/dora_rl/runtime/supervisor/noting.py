"""What is written down for people as a run goes on; no decision hangs on it."""

from __future__ import annotations

from dora_rl.core import events as e
from dora_rl.core.activities import ActivityLabel, IdleCause, IdleReason
from dora_rl.core.time_accounting import Activity
from dora_rl.core.types import Nanoseconds, StepId, Version
from dora_rl.runtime.supervisor.evaluation import Evaluated
from dora_rl.runtime.supervisor.parts import Parts


class Noting:
    """Figures and samples of a run."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def published(self, event: e.Published, at: Nanoseconds) -> None:
        """A version is out."""
        parts, version = self._parts, event.version
        parts.newest = version
        live = parts.books.live_versions
        verdicts = sum(parts.books.failed.values())
        parts.recorder.published(version, at, live, verdicts, parts.ledger.seconds)
        parts.recorder.note("published", at, version=version)
        self.evaluate(version)

    def moved(self, event: e.Moved, at: Nanoseconds) -> None:
        count, source, target = len(event.trajectories), str(event.source), str(event.target)
        self._parts.recorder.note("moved", at, source=source, target=target, count=count)

    def stepped(self, step: StepId, metrics: dict[str, float]) -> None:
        """The trainer is through with a step."""
        groups = [group for group in self._parts.books.groups.values() if group.step == step]
        self._parts.recorder.stepped(step, metrics, groups)
        self._write_samples(step)

    def alarmed(self, step: StepId, figures: dict[str, float]) -> None:
        """Engine and trainer are far apart in a step, which may be the last of the run."""
        recorder, gap, level = self._parts.recorder, figures["mismatch_gap"], figures["mismatch_alarm"]
        recorder.note("mismatch", self._parts.now(), step=step, gap=gap, stopped=level == 2.0)

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation is over."""
        self._parts.recorder.evaluated(result, self._parts.now())

    def label_trainer(self, cause: IdleCause | None = None) -> None:
        """What the trainer does from now on."""
        parts = self._parts
        account = parts.recorder.trainer
        if parts.crew.training:
            account.switch(parts.now(), Activity(ActivityLabel.TRAIN, parts.newest))
        elif account.current.label is not ActivityLabel.IDLE or cause is not None:
            account.switch(
                parts.now(), Activity(ActivityLabel.IDLE, parts.newest, cause or IdleCause(reason=IdleReason.ROLLOUT))
            )

    def evaluate(self, version: Version) -> None:
        """Ask for an evaluation of a version, if one is due."""
        parts = self._parts
        every = parts.config.evaluation.every
        due = every and (version % every == 0 or version == parts.config.control.steps)
        if parts.evaluation is not None and due:
            parts.evaluation.ask(version, parts.processes)

    def _write_samples(self, step: StepId) -> None:
        parts = self._parts
        chosen = [(group, book) for group, book in parts.books.groups.items() if book.step == step]
        for group, book in chosen[: parts.config.logging.samples]:
            for trajectory, one in book.trajectories.items():
                record = {
                    "step": step,
                    "group": group,
                    "trajectory": trajectory,
                    "version": book.version,
                    "versions": one.versions,
                    "prompt": parts.text.decode(book.prompt),
                    "response": parts.text.decode(one.response),
                    "tokens": len(one.response),
                    "reward": one.reward,
                    "reward_components": one.reward_components,
                    "stop": one.ended,
                }
                parts.recorder.sample(record)
