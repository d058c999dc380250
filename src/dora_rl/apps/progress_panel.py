"""The progress of a run in the terminal: a panel that is redrawn a few times a second, or one plain line per step.

Invariants:
- drawing takes at most 2% of the supervisor's time: the slower it is, the longer until the next time;
- nothing here changes the run; all values shown are those of the recorder and the orchestrator.
"""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.live import Live

from dora_rl.apps.panel import PanelValues, panel, step_line
from dora_rl.apps.run_reader import read_activity, read_facts, read_metrics
from dora_rl.apps.summary import ACCURACY, RECENT, REWARD, totals
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.types import SECOND

if TYPE_CHECKING:
    from rich.console import Console, Group

    from dora_rl.runtime.supervisor.run import Run

_INTERVAL = 0.25
_PAUSE_FACTOR = 50
"""After drawing for t seconds, the next drawing waits at least this many times t."""


class ProgressPanel:
    """Shows the progress of a run; call it after every event."""

    def __init__(self, run: Run, console: Console) -> None:
        self._run = run
        self._console = console
        self._due = 0.0
        self._seen = 0
        """Steps of this process that the values below include."""
        # A resumed run has earlier steps, which the recorder of this process does not have.
        past = read_metrics(run.run_dir)
        self._rewards = [one[REWARD] for one in past.steps.values()]
        self._accuracy = [(version, one[ACCURACY]) for version, one in past.evaluations.items()]
        self._evaluated = 0
        self._staleness = read_facts(run.run_dir).staleness
        self._time, _ = totals(read_activity(run.run_dir).windows)
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        """Tokens and seconds of each recent step."""
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._print()

    def __call__(self) -> None:
        """Update after an event."""
        if self._live is None:
            self._print()
        else:
            self._draw()

    def _print(self) -> None:
        if self._catch_up():
            self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        assert self._live is not None
        self._catch_up()
        self._live.update(self.panel(), refresh=True)
        self._due = now + max(_INTERVAL, _PAUSE_FACTOR * (time.monotonic() - now))

    def _catch_up(self) -> bool:
        """Read new values from the recorder; True if a step has ended."""
        recorder = self._run.metrics
        fresh = recorder.steps > self._seen
        if fresh:
            # If several steps have ended, the earlier ones get the reward of the last; the files have each value.
            self._rewards += [recorder.last[REWARD]] * (recorder.steps - self._seen)
            self._recent.append((recorder.last["batch/response_tokens"], recorder.last["timing_s/step"]))
            self._seen = recorder.steps
        for result in recorder.evaluations[self._evaluated :]:
            self._accuracy.append((result.version, result.accuracy))
        self._evaluated = len(recorder.evaluations)
        return fresh

    # -- text -----------------------------------------------------------------------------------------

    def line(self) -> str:
        """One line about the last step."""
        return step_line(self._values())

    def panel(self) -> Group:
        """The panel: a progress bar and a table."""
        return panel(self._values())

    def _values(self) -> PanelValues:
        run = self._run
        recorder, orchestrator, control = run.metrics, run.orchestrator, run.config.control
        snapshot = orchestrator.snapshot()
        return PanelValues(
            done=orchestrator.newest or 0,
            asked=control.steps,
            seconds=run.supervisor.now() / SECOND,
            last=recorder.last,
            rewards=self._rewards,
            accuracy=self._accuracy,
            recent=self._recent,
            time=self._time + recorder.time,
            staleness=self._staleness + recorder.staleness,
            running=orchestrator.requests_by_version,
            waiting=snapshot.waiting,
            trainer=self._trainer(),
            bound=snapshot.max_staleness if control.adaptive else None,
        )

    def _trainer(self) -> str:
        activity = self._run.metrics.trainer_time.current
        if activity.label is not ActivityLabel.IDLE:
            activity_text = {ActivityLabel.TRAIN: "training step", ActivityLabel.PUBLISH: "publishing version"}.get(
                activity.label, activity.label.value
            )
            return f"{activity_text} {activity.version}"
        return f"waiting: {activity.cause}"
