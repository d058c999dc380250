"""Freeing the weights of versions that the orchestrator has retired.

Invariant: a version that something still holds, such as an evaluation, is tried again until it can be freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.core.errors import StoreError
from dora_rl.core.types import Version

if TYPE_CHECKING:
    from dora_rl.runtime.launch.backend import Backend
    from dora_rl.weights.store import WeightStore


class Retirement:
    """Retired versions that are not freed yet."""

    def __init__(self, store: WeightStore, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._held: set[Version] = set()

    def retire(self, version: Version) -> None:
        """Free a version now, or as soon as nothing holds it."""
        try:
            self._store.retire(version)
        except StoreError:
            # Something holds it, or a former supervisor has freed it.
            if version in self._store.versions():
                self._held.add(version)
            else:
                self._held.discard(version)
        else:
            self._backend.version_retired(version)
            self._held.discard(version)

    def retry(self) -> None:
        """Try the versions again that were still held."""
        for version in sorted(self._held):
            self.retire(version)
