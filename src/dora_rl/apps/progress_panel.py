"""The progress of a run in the terminal: a panel that is redrawn a few times a second, or one plain line per step.

Invariants:
- drawing takes at most 2% of the supervisor's time: the slower it is, the longer until the next time;
- nothing here changes the run; all values shown are those of the recorder and the orchestrator.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dora_rl.apps.run_reader import read_activity, read_facts, read_metrics
from dora_rl.apps.summary import ACCURACY, RECENT, REWARD, shares, totals
from dora_rl.apps.summary_table import duration, histogram, idle
from dora_rl.core.activities import ActivityLabel
from dora_rl.core.time_accounting import occupancy
from dora_rl.core.types import SECOND

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.run import Run

_INTERVAL = 0.25
_PAUSE_FACTOR = 50
"""After drawing for t seconds, the next drawing waits at least this many times t."""
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDTH = 24


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
        last = self._run.metrics.last
        fields = [f"steps done {self._done}{self._asked}", f"reward {self._rewards[-1]:.3f}"]
        if self._accuracy:
            fields.append("accuracy {1:.1%} (v{0})".format(*self._accuracy[-1]))
        fields += [
            f"{self._rate:,.0f} tokens/s",
            f"{last['timing_s/step']:.2f} s",
            f"occupancy {self._occupancy:.0%}",
            f"staleness {last['off_policy/trajectory_staleness']:.1f}{self._bound}",
            f"live versions {last['rollout/live_versions']:.0f}",
        ]
        return "  ".join(fields)

    def panel(self) -> Group:
        """The panel: a progress bar and a table."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        return Group(self._bar(), table)

    def _bar(self) -> Table:
        bar = Table.grid(padding=(0, 1, 0, 0))
        steps = self._run.config.control.steps
        progress = ProgressBar(total=steps, completed=self._done, width=_WIDTH, pulse=steps is None)
        bar.add_row(Text(f"steps done {self._done}{self._asked}", style="bold"), progress, self._left())
        return bar

    def _rows(self) -> list[tuple[str, str]]:
        recorder = self._run.metrics
        rows = []
        if self._rewards:
            rows.append(("reward", f"{self._rewards[-1]:.3f}  {sparks(self._rewards)}"))
        if self._accuracy:
            (first, before), (last, now) = self._accuracy[0], self._accuracy[-1]
            rows.append(
                ("held-out", f"{before:.1%} (v{first})" + (f" -> {now:.1%} (v{last})" if last != first else ""))
            )
        rows.append(("rollout", f"{self._rate:,.0f} tokens/s trained, occupancy {self._occupancy:.0%}"))
        rows.append(("versions", self._versions()))
        rows.append(
            ("staleness", (histogram(self._staleness + recorder.staleness) or "nothing trained yet") + self._bound)
        )
        rows.append(("idle slots", idle(shares(self._time + recorder.time)) or "none"))
        rows.append(("trainer", self._trainer()))
        return rows

    def _versions(self) -> str:
        """Live versions, newest first, with their running and waiting requests."""
        running = self._run.orchestrator.requests_by_version
        waiting = self._run.orchestrator.snapshot().waiting
        live = sorted({v for v, count in (*running.items(), *waiting.items()) if count}, reverse=True)
        named = [
            f"v{version}: {running.get(version, 0)}"
            + (f" + {waiting[version]} waiting" if waiting.get(version) else "")
            for version in live
        ]
        return "  ".join(named) + "  requests" if named else "no requests"

    def _trainer(self) -> str:
        activity = self._run.metrics.trainer_time.current
        if activity.label is not ActivityLabel.IDLE:
            activity_text = {ActivityLabel.TRAIN: "training step", ActivityLabel.PUBLISH: "publishing version"}.get(
                activity.label, activity.label.value
            )
            return f"{activity_text} {activity.version}"
        return f"waiting: {activity.cause}"

    @property
    def _bound(self) -> str:
        """The staleness bound in force, if the run chooses it."""
        if not self._run.config.control.adaptive:
            return ""
        return f" (at most {self._run.orchestrator.snapshot().max_staleness})"

    @property
    def _done(self) -> int:
        return self._run.orchestrator.newest or 0

    @property
    def _asked(self) -> str:
        steps = self._run.config.control.steps
        return "" if steps is None else f"/{steps}"

    @property
    def _rate(self) -> float:
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds else 0.0

    @property
    def _occupancy(self) -> float:
        return occupancy(self._time + self._run.metrics.time)

    def _left(self) -> str:
        elapsed = duration(self._run.supervisor.now() / SECOND)
        steps = self._run.config.control.steps
        if not self._recent:
            return "starting"
        if steps is None or steps == self._done:
            return f"{elapsed} elapsed"
        each = sum(seconds for _, seconds in self._recent) / len(self._recent)
        return f"{elapsed} elapsed, about {duration(each * (steps - self._done))} left"


def sparks(values: list[float], width: int = _WIDTH) -> str:
    """A curve in one line of text: the means of equal intervals, scaled between the lowest and the highest."""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
