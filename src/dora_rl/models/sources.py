"""A source of versions for an engine: weights that are already in the memory of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.core.errors import VersionError
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version
from dora_rl.models.fingerprint import fingerprint


class MemoryWeights:
    """Versions as tensors of this process, by their names in the module's `state_dict`."""

    def __init__(self, versions: Mapping[Version, Mapping[str, Any]] | None = None) -> None:
        self._versions = dict(versions or {})
        self._fingerprints: dict[Version, Fingerprint] = {}
        self._probes: dict[Version, Probe] = {}

    @classmethod
    def of(cls, model: Any, version: Version = 0) -> MemoryWeights:
        """The weights of a module as one version; they are shared, not copied."""
        return cls({version: {name: tensor.detach() for name, tensor in model.state_dict().items()}})

    def put(self, version: Version, tensors: Mapping[str, Any], probe: Probe | None = None) -> None:
        """Publish a version."""
        self._versions[version] = tensors
        if probe is not None:
            self._probes[version] = probe

    def drop(self, version: Version) -> None:
        """Forget a version; an engine that serves it keeps its tensors."""
        for kept in (self._versions, self._fingerprints, self._probes):
            kept.pop(version, None)

    def tensors(self, version: Version) -> Mapping[str, Any]:
        """The tensors of a version."""
        if version not in self._versions:
            have = ", ".join(map(str, sorted(self._versions))) or "none"
            raise VersionError(f"version {version} is not in memory; the versions in memory are: {have}")
        return self._versions[version]

    def probe(self, version: Version) -> Probe | None:
        """The probe that was published with the version."""
        return self._probes.get(version)

    def fingerprint(self, version: Version) -> Fingerprint:
        """The fingerprint of the version's tensors, computed once."""
        if version not in self._fingerprints:
            self._fingerprints[version] = fingerprint(self.tensors(version))
        return self._fingerprints[version]
