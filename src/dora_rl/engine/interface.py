"""What a rollout worker asks of an engine, whatever its kind.

    submit, load, unload, abort, extend, end, export, import_      between steps
    step()                                                         computes, and returns what there is to report

Every engine keeps these invariants:
- all tokens of a request come from the version in its slot (mode `partial` apart), and every report carries that
  version, and its fingerprint where the request ends;
- tokens are reported once, in order, and before the event that follows from them;
- a request that can't be served raises a `RequestError` and disturbs no other request;
- every moment of an account has one label, so its totals add up.

`RolloutEngine` is three smaller interfaces (slots, requests, migration) and what concerns the engine as a whole.
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


class SlotControl(Protocol):
    """Versions in slots."""

    def serving(self, slot: int) -> Version | None:
        """Return the version that a slot serves, or None."""
        ...

    def load(self, slot: int, version: Version, *, in_flight: bool = False) -> None:
        """Begin to load a version, with `in_flight` under running requests; a later step reports how it went."""
        ...

    def unload(self, slot: int) -> None:
        """Stop serving from a slot that has no requests, and release its weights."""
        ...

    def note_idle(self, slot: int, cause: IdleCause) -> None:
        """Account the idle time of a slot to this cause until the slot has work."""
        ...


class RequestControl(Protocol):
    """Requests that run, wait, or are parked between two turns."""

    def submit(self, request: Request, slot: int) -> None:
        """Accept a request, or refuse it with a `RequestError`."""
        ...

    def has(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Return whether this attempt is here, running, waiting or parked."""
        ...

    def abort(self, trajectory: TrajectoryId, attempt: Attempt) -> bool:
        """Forget this attempt, and return whether it was here."""
        ...

    def extend(self, trajectory: TrajectoryId, attempt: Attempt, tokens: Iterable[int]) -> None:
        """Append the environment's tokens to a parked request and resume it."""
        ...

    def end(self, trajectory: TrajectoryId, attempt: Attempt) -> None:
        """Report a parked request as generated: its last turn is over."""
        ...


class KvMigration(Protocol):
    """Requests that leave for another engine of the same kind, or arrive from one."""

    def export(self, trajectories: Iterable[TrajectoryId], *, shared: bool = True) -> KvBundle:
        """Remove requests and return them as a bundle, in shared memory or not; this engine reports their tokens."""
        ...

    def import_(self, bundle: KvBundle, slot: int) -> tuple[tuple[TrajectoryId, ...], tuple[BundleError, ...]]:
        """Resume the requests of a bundle; return those that arrived, and an error for each of the others."""
        ...


class RolloutEngine(SlotControl, RequestControl, KvMigration, Protocol):
    """One rollout engine. It is not thread-safe: one thread calls it."""

    def step(self) -> StepOutput:
        """Compute once, for all slots, and return what there is to report."""
        ...

    def drain(self) -> StepOutput:
        """Return what there is to report without computing."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        ...

    @property
    def running(self) -> int:
        """Number of requests that the next step would advance."""
        ...

    def spec(self) -> InstanceSpec:
        """Return the capacity of this instance: slots, requests and KV tokens."""
        ...

    def progress(self) -> Progress:
        """Return the heartbeat: KV in use and the length of each response."""
        ...

    @property
    def kernels(self) -> str:
        """Name of what computes, for the log and the report."""
        ...

    @property
    def stats(self) -> Stats:
        """Counters since the engine began."""
        ...

    @property
    def accounts(self) -> Sequence[TimeAccount]:
        """Where the time went: one account for each batch that the engine decodes."""
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with this many threads from the next step on; without effect where their number is fixed."""
        ...
