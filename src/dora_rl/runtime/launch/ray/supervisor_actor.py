"""The supervisor of a run as a Ray actor.

Invariants:
- everything that must not be lost is in the ledger: if the actor is gone, the run is resumed with a new one;
- how a run ended is returned as plain data, never raised through Ray;
- the actor owns the other actors of the run, so they end with it;
- every actor that has a handle to it imports this module, so nothing heavy is imported until it is used.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from dora_rl.core.errors import IntegrityError, RunError, UserError
from dora_rl.core.types import Version

if TYPE_CHECKING:
    from dora_rl.runtime.supervisor.run import Run

Ending = Literal["finished", "stopped", "user", "run", "integrity", "bug"]


class SupervisorActor:
    """The actor."""

    def __init__(self, run_dir: str, bound: int | None = None) -> None:
        import ray

        from dora_rl.runtime.launch.ray.backend import RayBackend
        from dora_rl.runtime.launch.ray.object_store import ObjectStore
        from dora_rl.runtime.run_dir import RunDir

        self._run_dir = RunDir.open(run_dir)
        self._bound = bound
        config = self._run_dir.read()
        this_actor = ray.get_runtime_context().current_actor
        self._object_store = ObjectStore(self._run_dir.store(config))
        self._backend = RayBackend(self._run_dir, config, self._object_store, this_actor)
        self._run: Run | None = None
        self._stopping = threading.Event()
        self._notices: list[str] = []

    # -- for the process that started the run -----------------------------------------------------------------

    def go(self) -> tuple[Ending, str]:
        """Drive the run to its end; returns how it ended, and the message about it."""
        from dora_rl.runtime.launch.ray.backend import RayMachine
        from dora_rl.runtime.supervisor.run import Run

        try:
            machine = RayMachine(cluster=self._backend)
            run = self._run = Run(self._run_dir, notify=self.notify, machine=machine, bound=self._bound)
            run.supervisor.stopping = self._stopping.is_set()
            with self.watching(run) as watch:
                run.run(watch)
            return ("finished" if run.orchestrator.finished else "stopped"), ""
        except UserError as error:
            return "user", str(error)
        except RunError as error:
            return "run", str(error)
        except IntegrityError as error:
            return "integrity", str(error)
        except BaseException:
            return "bug", traceback.format_exc()
        finally:
            self._backend.close()

    def stop(self) -> None:
        """End the run; everything is kept."""
        self._stopping.set()
        if self._run is not None:
            self._run.supervisor.stopping = True

    def notices(self, after: int) -> list[str]:
        """Messages for the user, without the first `after` ones."""
        return self._notices[after:]

    def notify(self, text: str) -> None:
        """Add a message for the user."""
        self._notices.append(text)

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """A function to call after each event; a subclass may show the progress there."""
        yield lambda: None

    # -- for the other actors of the run ----------------------------------------------------------------------

    def rendezvous_address(self, address: str) -> tuple[str, int]:
        """Where a worker of this address connects."""
        return self._backend.rendezvous_address(address)

    def find_version(self, version: Version) -> list[Any]:
        """The reference to a version; empty if there is no such version."""
        return self._object_store.find_version(version)

    def hold_bundle(self, name: str, bundle: list[Any]) -> None:
        """Hold a KV bundle until it is taken."""
        self._object_store.hold_bundle(name, bundle[0])

    def take_bundle(self, name: str) -> list[Any]:
        """The reference to a KV bundle; empty if there is no such bundle."""
        return self._object_store.take_bundle(name)
