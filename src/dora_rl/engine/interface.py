"""The engine port: what an instance asks of a rollout engine, whichever it is.

    submit, load, unload, abort, extend, end, export, import_      between steps
    step()                                                         compute, and say what came of it

Whoever stands behind it keeps these promises:
- all tokens of a request come from the version in its slot (mode `partial` apart), and every report carries that
  version, and its fingerprint where the request ends;
- tokens are reported once, in order, and before the event that follows from them;
- a request that can't be served raises a `RequestError`, and no other notices;
- every moment of an account has one label, so its totals add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dora_rl.core.activities import IdleCause
from dora_rl.core.errors import BundleError
from dora_rl.core.events import Progress
from dora_rl.core.time_accounting import TimeAccount
from dora_rl.core.types import Attempt, InstanceSpec, TrajectoryId, Version
from dora_rl.engine.kv_transfer.format import KvBundle
from dora_rl.engine.requests import Request, StepOutput
from dora_rl.engine.stats import Stats


class RolloutEngine(Protocol):
    """One rollout engine. Not thread-safe: one thread calls it."""

    # What it is.

    @property
    def kernels(self) -> str:
        """What computes, for people."""
        ...

    @property
    def stats(self) -> Stats:
        """What it has done so far."""
        ...

    @property
    def accounts(self) -> Sequence[TimeAccount]:
        """Where its time went: one account for each batch that it decodes."""
        ...

    @property
    def running(self) -> int:
        """Requests that a step would go on with."""
        ...

    @property
    def busy(self) -> bool:
        """There is something to do in a step."""
        ...

    def spec(self) -> InstanceSpec:
        """What this instance can do."""
        ...

    def progress(self) -> Progress:
        """Heartbeat: load, and how far each request is."""
        ...

    # Slots.

    def serving(self, slot: int) -> Version | None:
        """The version in a slot."""
        ...

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Begin to load a version; a later step says `SlotLoaded` or `SlotLoadFailed`."""
        ...

    def unload(self, slot: int) -> None:
        """The slot serves nothing from now on and lets go of its weights."""
        ...

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Why a slot has nothing to do; holds until it has."""
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with so many threads from the next step on, where that can be changed."""
        ...

    # Requests.

    def submit(self, request: Request, slot: int) -> None:
        """Take a request in, or refuse it with a typed error."""
        ...

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """This attempt is here, running, waiting or parked."""
        ...

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, should it be here."""
        ...

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """A parked request goes on after what its environment said."""
        ...

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """A parked request has had its last turn; it is reported as generated."""
        ...

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Requests leave in a bundle, in shared memory or not. What they sampled so far is reported here first."""
        ...

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Requests of a bundle go on here: who arrived, and what was wrong with the rest."""
        ...

    # One step.

    def step(self) -> StepOutput:
        """Compute once, and give what there is to report."""
        ...

    def drain(self) -> StepOutput:
        """What is waiting to be reported."""
        ...
