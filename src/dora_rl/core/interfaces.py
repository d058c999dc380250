"""The one seam between decisions and the world.

A world carries out commands and yields events in the order in which they become known. The local runtime, the Ray
runtime, the simulator and the tests are worlds; `drive` is the only loop there is.

    world --event, now--> orchestrator --commands--> world
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dora_rl.core.commands import Command
from dora_rl.core.events import Event
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Nanoseconds, Version


class StateMachine(Protocol):
    """What takes the decisions: the orchestrator."""

    def step(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Take notice of an event and say what to do about it."""
        ...

    def wake_at(self) -> Nanoseconds | None:
        """When a `Tick` is due, if nothing else happens before."""
        ...


class Runtime(Protocol):
    """What stands behind the commands."""

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[Event, Nanoseconds] | None:
        """Wait for the next event, at most until `wake_at` (then it is a `Tick`); None ends the run."""
        ...

    def execute(self, commands: Iterable[Command]) -> None:
        """Begin what the commands ask for; results come back as events."""
        ...


def drive(decider: StateMachine, world: Runtime) -> None:
    """Feed events to the orchestrator and its commands to the world, until the world ends."""
    while (arrived := world.next_event(decider.wake_at())) is not None:
        event, now = arrived
        world.execute(decider.step(event, now))


class TensorSpec(NamedTuple):
    """What a tensor will be, said before it is there."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16 ..."""
    shape: tuple[int, ...]


class WeightSink(Protocol):
    """Where the trainer's versions go: the weight store."""

    def publish(
        self,
        version: Version,
        specs: Sequence[TensorSpec],
        tensors: Iterable[Any],
        *,
        adapter: bool,
        write: bool,
        probe: Probe | None,
    ) -> Fingerprint:
        """Make weights loadable as this version. `tensors` come in the order of `specs`.

        Every process of a sharded trainer calls this, since gathering a tensor takes all of them; one writes.
        """
        ...


class WeightSource(Protocol):
    """Where an engine takes published weights from. All calls raise `VersionError` for a version that is not there."""

    def tensors(self, version: Version) -> Mapping[str, Any]:
        """The tensors of a version by their names in the module's `state_dict`; mapped from where they lie, no copy."""
        ...

    def fingerprint(self, version: Version) -> Fingerprint:
        """What the version was published as."""
        ...

    def probe(self, version: Version) -> Probe | None:
        """What the trainer computed with the version; None: it was published without a probe."""
        ...


class PublishedFile(NamedTuple):
    """A published version as a file, for an engine that reads files by itself."""

    path: Path
    """Safetensors."""
    fingerprint: Fingerprint
    """Proven on what lies in the file."""
    adapter: bool
    """It is a LoRA adapter, to be put over the base weights."""
    probe: Probe | None = None
    """What the trainer computed with the version; None: it was published without a probe."""


class WeightFiles(Protocol):
    """Where such an engine takes published weights from."""

    def hold(self, version: Version) -> AbstractContextManager[PublishedFile]:
        """The file of a version, which stays there meanwhile; raises `VersionError` if it is not there."""
        ...
