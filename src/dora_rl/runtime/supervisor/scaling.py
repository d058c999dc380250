"""How many instances a run should have, while it runs.

`dora-rl scale` writes the number into the run's configuration, which the supervisor checks every half second; so it
also holds for a run that is resumed. With `ray.instances = "all"` the cluster's capacity decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dora_rl.core.errors import UserError
from dora_rl.runtime.launch.backend import Backend
from dora_rl.runtime.run_dir import RunDir


class Scaling:
    """Reads the number of instances that is wanted."""

    def __init__(
        self, run_dir: RunDir, backend: Backend, changed: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._run_dir = run_dir
        self._backend = backend
        self._changed = changed
        """Called with the former and the new number when the user has changed it."""
        self._seen: tuple[int, int] | None = None
        self._number = 0

    def wanted(self) -> int:
        """The number of instances."""
        capacity = self._backend.capacity()
        return self._written() if capacity is None else capacity

    def _written(self) -> int:
        status = self._run_dir.config.stat()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            before = self._number
            with contextlib.suppress(UserError):  # an invalid configuration changes nothing
                self._number = self._run_dir.read().rollout.instances
            if before not in (0, self._number):
                self._changed(before, self._number)
            self._seen = seen
        return self._number


def scale(run_dir: RunDir, instances: int) -> int:
    """Set how many instances a run should have; returns the former number."""
    config = run_dir.read()
    if instances < 1:
        raise UserError(f"a run needs at least 1 instance, not {instances}")
    if config.runtime == "ray" and config.ray.instances == "all":
        raise UserError("the run takes all the room of its cluster: add or remove nodes instead")
    rollout = config.rollout.model_copy(update={"instances": instances})
    run_dir.write(config.model_copy(update={"rollout": rollout}))
    return config.rollout.instances
