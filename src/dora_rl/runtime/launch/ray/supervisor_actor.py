"""The supervisor of a run in a Ray actor.

Invariants:
- all that it must not lose is in the ledger: an actor that is gone is replaced by resuming the run;
- what ends a run is told as plain data, never raised through Ray;
- it owns the other actors of the run, so they end with it;
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

    def __init__(self, folder: str, bound: int | None = None) -> None:
        import ray

        from dora_rl.runtime.launch.ray.backend import RayBackend
        from dora_rl.runtime.launch.ray.object_store import ObjectStore
        from dora_rl.runtime.run_dir import RunDir

        self._folder = RunDir.open(folder)
        self._bound = bound
        config = self._folder.read()
        me = ray.get_runtime_context().current_actor
        self._shelf = ObjectStore(self._folder.store(config))
        self._host = RayBackend(self._folder, config, self._shelf, me)
        self._run: Run | None = None
        self._stopping = threading.Event()
        self._said: list[str] = []

    # -- for whoever started the run --------------------------------------------------------------------------

    def go(self) -> tuple[Ending, str]:
        """Carry the run to its end; how it ended, and what there is to say about it."""
        from dora_rl.runtime.launch.ray.backend import RayMachine
        from dora_rl.runtime.supervisor.run import Run

        try:
            machine = RayMachine(cluster=self._host)
            run = self._run = Run(self._folder, notice=self.say, machine=machine, bound=self._bound)
            run.world.stopping = self._stopping.is_set()
            with self.watching(run) as watch:
                run.go(watch)
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
            self._host.close()

    def stop(self) -> None:
        """End, with everything kept."""
        self._stopping.set()
        if self._run is not None:
            self._run.world.stopping = True

    def said(self, after: int) -> list[str]:
        """Sentences for people, but so many that are known already."""
        return self._said[after:]

    def say(self, text: str) -> None:
        self._said.append(text)

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Callable[[], None]]:  # noqa: ARG002
        """Somebody may look on."""
        yield lambda: None

    # -- for the run's other actors ---------------------------------------------------------------------------

    def door(self, address: str) -> tuple[str, int]:
        """Where a process of this address knocks."""
        return self._host.door(address)

    def find(self, version: Version) -> list[Any]:
        """The reference to a version."""
        return self._shelf.find(version)

    def keep(self, name: str, bundle: list[Any]) -> None:
        """Hold a bundle for whoever fetches it."""
        self._shelf.keep(name, bundle[0])

    def take(self, name: str) -> list[Any]:
        """The reference to a bundle."""
        return self._shelf.take(name)
