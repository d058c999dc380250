"""The interfaces between the layers: state machine and runtime, trainer and weight store, weight store and engine.

A runtime executes commands and yields events in the order in which they become known. The supervisor (on one machine
or on Ray), the simulator and the tests' runtimes implement it; `drive` is the only loop.

    runtime --event, now--> orchestrator --commands--> runtime
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
    """Takes the decisions; the orchestrator implements it."""

    def step(self, event: Event, now: Nanoseconds) -> list[Command]:
        """Process an event and return the commands that follow from it."""
        ...

    def wake_at(self) -> Nanoseconds | None:
        """When a `Tick` is due, unless another event comes first."""
        ...


class Runtime(Protocol):
    """Executes commands and reports events."""

    def next_event(self, wake_at: Nanoseconds | None) -> tuple[Event, Nanoseconds] | None:
        """Wait for the next event, at most until `wake_at`, when it is a `Tick`. None ends the run."""
        ...

    def execute(self, commands: Iterable[Command]) -> None:
        """Start executing the commands; their results come back as events."""
        ...


class Projection(Protocol):
    """State that is derived from the event log, one event at a time: the same code live and when a run is resumed."""

    def apply(self, event: Event, commands: Sequence[Command], at: Nanoseconds) -> None:
        """Take in an event, the commands that the orchestrator answered it with, and the time of the event."""
        ...


def drive(machine: StateMachine, runtime: Runtime) -> None:
    """Feed events to the state machine and its commands to the runtime until the runtime ends the run."""
    while (arrived := runtime.next_event(machine.wake_at())) is not None:
        event, now = arrived
        runtime.execute(machine.step(event, now))


class TensorSpec(NamedTuple):
    """Describes a tensor before it exists."""

    name: str
    dtype: str
    """In the notation of safetensors: F32, BF16 ..."""
    shape: tuple[int, ...]


class WeightSink(Protocol):
    """Receives the versions that the trainer publishes; the weight store implements it."""

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
        """Make weights loadable as this version. `tensors` are in the order of `specs`.

        Every rank of a sharded trainer calls this, since all ranks take part in gathering a tensor; one rank writes.
        """
        ...


class WeightSource(Protocol):
    """Gives published weights to an engine. All methods raise `VersionError` for a version that is not available."""

    def tensors(self, version: Version) -> Mapping[str, Any]:
        """The tensors of a version by their names in the module's `state_dict`, memory-mapped without a copy."""
        ...

    def fingerprint(self, version: Version) -> Fingerprint:
        """The fingerprint that the version was published with."""
        ...

    def probe(self, version: Version) -> Probe | None:
        """The probe that the version was published with; None if there is none."""
        ...


class PublishedFile(NamedTuple):
    """A published version as a file, for an engine that reads weight files itself."""

    path: Path
    """A safetensors file."""
    fingerprint: Fingerprint
    """The fingerprint, verified against the contents of the file."""
    adapter: bool
    """The file is a LoRA adapter over the base weights."""
    probe: Probe | None = None
    """The probe that the version was published with; None if there is none."""


class WeightFiles(Protocol):
    """Gives published weights, as files, to such an engine."""

    def hold(self, version: Version) -> AbstractContextManager[PublishedFile]:
        """Keep the file of a version in place while the context is open; raise `VersionError` if it does not exist."""
        ...
