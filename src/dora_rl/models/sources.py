"""Weights that are already in memory, as a source that an engine loads versions from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from dora_rl.core.errors import VersionError
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version


class MemoryWeights:
    """Versions as tensors in this process, by their names in the module's `state_dict`."""

    def __init__(self, versions: Mapping[Version, Mapping[str, Any]] | None = None) -> None:
        self._versions = dict(versions or {})
        self._fingerprints: dict[Version, Fingerprint] = {}
        self._probes: dict[Version, Probe] = {}

    @classmethod
    def of(cls, model: Any, version: Version = 0) -> MemoryWeights:
        """The weights of a module as one version, shared, not copied."""
        return cls({version: {name: tensor.detach() for name, tensor in model.state_dict().items()}})

    def put(self, version: Version, tensors: Mapping[str, Any], probe: Probe | None = None) -> None:
        """Publish a version here."""
        self._versions[version] = tensors
        if probe is not None:
            self._probes[version] = probe

    def tensors(self, version: Version) -> Mapping[str, Any]:
        """The tensors of a version."""
        if version not in self._versions:
            have = ", ".join(map(str, sorted(self._versions))) or "none"
            raise VersionError(f"version {version} is not there; there are: {have}")
        return self._versions[version]

    def probe(self, version: Version) -> Probe | None:
        """What was published with the version."""
        return self._probes.get(version)

    def fingerprint(self, version: Version) -> Fingerprint:
        """A hash over names, shapes and bytes, computed once."""
        if version not in self._fingerprints:
            digest = hashlib.blake2b(digest_size=16)
            for name, tensor in sorted(self.tensors(version).items()):
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(memoryview(tensor.cpu().contiguous().flatten().view(dtype=_bytes()).numpy()))
            self._fingerprints[version] = digest.hexdigest()
        return self._fingerprints[version]


def _bytes() -> Any:
    import torch

    return torch.uint8
