"""Callbacks of a run, called in the process that called `train`.

Invariants:
- a callback never raises into the run: an exception is kept, the run stops, and `train` raises it after everything is
  closed. A run that was stopped in any way can be resumed;
- `STOP` takes effect when a version is published, so no step is left half done;
- values that a callback gets are copies.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from dora_rl.core.errors import UserError
from dora_rl.core.types import Version

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.run import Run

METHODS = ("on_step", "on_publish", "on_eval", "on_sample", "on_checkpoint")


class _Stop(enum.Enum):
    STOP = "stop"

    def __repr__(self) -> str:
        return "dora_rl.STOP"


STOP: Final = _Stop.STOP
"""A callback that returns this ends the run after the current step."""


class StopTraining(Exception):  # noqa: N818
    """A callback that raises this ends the run after the current step, as if it had returned `STOP`."""


class Callback(Protocol):
    """What a callback can have; an object with any of these methods is one. Each may return `STOP`.

    A subclass needs only the methods that it uses.
    """

    def on_step(self, step: int, metrics: dict[str, float]) -> object:  # noqa: ARG002
        """A step is trained and its version is published."""
        return None

    def on_publish(self, version: int) -> object:  # noqa: ARG002
        """A version is published; version 0 is the model that the run starts from."""
        return None

    def on_eval(self, version: int, metrics: dict[str, float]) -> object:  # noqa: ARG002
        """The evaluation of a version is complete."""
        return None

    def on_sample(self, sample: dict[str, Any]) -> object:  # noqa: ARG002
        """A response of the current step, as in `samples.jsonl`; `logging.samples` sets how many there are."""
        return None

    def on_checkpoint(self, version: int, path: Path) -> object:  # noqa: ARG002
        """The checkpoint of a version is written; `policy` in it can be loaded by `transformers`."""
        return None


class Callbacks:
    """The callbacks of a run, as an observer of what it records."""

    def __init__(self, callbacks: Iterable[object]) -> None:
        self._callbacks = list(callbacks)
        for one in self._callbacks:
            if not any(callable(getattr(one, name, None)) for name in METHODS):
                raise UserError(f"a callback has none of the methods {', '.join(METHODS)}: {one!r:.100}")
        self.error: BaseException | None = None
        """What a callback has raised."""
        self.stopped = False
        """Whether a callback has ended the run."""
        self._asked = False
        self._stop: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def observe(self, run: Run) -> Callbacks:
        """Observe this run, and stop it when a callback asks."""

        def stop() -> None:
            # A run that is finished is left to write its last checkpoint and evaluation.
            if not run.orchestrator.finished and not run.supervisor.stopping:
                self.stopped = run.supervisor.stopping = True

        self._stop = stop
        return self

    def sampled(self, sample: dict[str, Any]) -> None:
        self._call("on_sample", sample)

    def published(self, version: Version, metrics: dict[str, float] | None) -> None:
        if metrics is not None:
            self._call("on_step", version - 1, metrics)
        self._call("on_publish", version)
        if self._asked:
            self._stop()

    def evaluated(self, version: Version, metrics: dict[str, float]) -> None:
        self._call("on_eval", version, metrics)

    def checkpointed(self, version: Version, path: Path) -> None:
        self._call("on_checkpoint", version, path)

    def _call(self, method: str, *values: Any) -> None:
        for one in self._callbacks:
            function = getattr(one, method, None)
            if self.error is not None or not callable(function):
                continue
            try:
                self._asked = function(*copy.deepcopy(values)) is STOP or self._asked
            except StopTraining:
                self._asked = True
            except BaseException as error:
                self.error = error
                self._stop()
