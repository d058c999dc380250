"""How many instances a run shall have, while it goes on.

`dora-rl scale` writes the number into the run's configuration, which is looked at now and then; so it holds for a run
that is resumed as well. On a cluster that is to be filled, the cluster says it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from dora_rl.core.errors import UserError
from dora_rl.runtime.launch.backend import Backend
from dora_rl.runtime.run_dir import RunDir


class Scaling:
    """Looks for the number."""

    def __init__(self, folder: RunDir, backend: Backend, changed: Callable[[int, int], None] = lambda *_: None) -> None:
        self._folder = folder
        self._backend = backend
        self._changed = changed
        """Called with the number before and after, when somebody has written another."""
        self._seen: tuple[int, int] | None = None
        self._number = 0

    def wanted(self) -> int:
        """Instances."""
        capacity = self._backend.capacity()
        return self._written() if capacity is None else capacity

    def _written(self) -> int:
        status = self._folder.config.stat()
        seen = (status.st_mtime_ns, status.st_ino)
        if seen != self._seen:
            before = self._number
            with contextlib.suppress(UserError):  # as it was, if somebody has written nonsense
                self._number = self._folder.read().rollout.instances
            if before not in (0, self._number):
                self._changed(before, self._number)
            self._seen = seen
        return self._number


def scale(folder: RunDir, instances: int) -> int:
    """Write down how many instances a run shall have; how many it was to have before."""
    config = folder.read()
    if instances < 1:
        raise UserError(f"a run needs at least 1 instance, not {instances}")
    if config.runtime == "ray" and config.ray.instances == "all":
        raise UserError("the run takes all the room of its cluster: add or remove nodes instead")
    rollout = config.rollout.model_copy(update={"instances": instances})
    folder.write(config.model_copy(update={"rollout": rollout}))
    return config.rollout.instances
