"""How vLLM serves versions: one set of weights at a time, or one adapter per version over one base model.

Invariants:
- a slot serves exactly the version that was loaded into it last, or none;
- a version is verified three times: the file by its fingerprint, the tensors inside vLLM by comparing them with the
  file (`prove`; not with several devices, each of which has only a part), and the computation by the probe;
- the one set of weights changes only while nothing runs, and clears vLLM's cache; adapters are named by their version,
  which is part of the key of vLLM's cache, so they are loaded and removed while others run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Protocol

from dora_rl.core.errors import FingerprintError, SlotError
from dora_rl.core.interfaces import PublishedFile, WeightFiles
from dora_rl.core.probe import Probe
from dora_rl.core.types import Fingerprint, Version
from dora_rl.engine.vllm.core import Core, Lora


class Serving(Protocol):
    """Versions in slots."""

    slots: int

    def load(self, slot: int, version: Version) -> Fingerprint:
        """Serve a version from this slot; if that fails, raise, and the slot serves nothing."""
        ...

    def unload(self, slot: int) -> None:
        """Serve nothing from this slot."""
        ...

    def probe(self, slot: int) -> Probe | None:
        """Return the probe that was published with the version in this slot."""
        ...

    def adapter(self, slot: int) -> Any:
        """Return the adapter that requests of this slot pass to vLLM, or None."""
        ...


def label(version: Version) -> str:
    """Return the name of a version inside vLLM."""
    return f"v{version}"


class AllWeights:
    """One slot, whose weights are replaced as a whole."""

    slots = 1

    def __init__(self, core: Core, files: WeightFiles, *, prove: bool) -> None:
        self._core = core
        self._files = files
        self._prove = prove
        self._folder = _folder()
        self._probe: Probe | None = None

    def load(self, slot: int, version: Version) -> Fingerprint:  # noqa: ARG002 there is one slot
        """Load all weights of the version."""
        with self._files.hold(version) as file:
            if file.adapter:
                raise SlotError(f"version {version} is an adapter, but this run trains all weights")
            staged = Path(self._folder.name) / label(version)
            staged.mkdir(exist_ok=True)
            link = _link(staged / "model.safetensors", file)
            self._core.reload(str(staged), label(version))
            if self._prove:
                _require_same(self._core.differs(str(link)), version)
            link.unlink()
            self._probe = file.probe
            return file.fingerprint

    def probe(self, slot: int) -> Probe | None:  # noqa: ARG002
        """Return the probe of the loaded weights."""
        return self._probe

    def unload(self, slot: int) -> None:
        """Do nothing: the weights stay in memory, unused, until the next load replaces them."""

    def adapter(self, slot: int) -> Any:  # noqa: ARG002
        """Return None: there is no adapter."""
        return None


class Adapters:
    """One slot per adapter, in one batch over one base model."""

    def __init__(self, core: Core, files: WeightFiles, slots: int, lora: Lora, *, prove: bool) -> None:
        self.slots = slots
        self._core = core
        self._files = files
        self._lora = lora
        self._prove = prove
        self._folder = _folder()
        self._adapters: list[Any] = [None] * slots
        self._probes: list[Probe | None] = [None] * slots

    def load(self, slot: int, version: Version) -> Fingerprint:
        """Load the adapter of the version, beside the others."""
        self.unload(slot)
        with self._files.hold(version) as file:
            if not file.adapter:
                raise SlotError(f"version {version} is a whole model, but this run trains an adapter")
            staged = Path(self._folder.name) / label(version)
            staged.mkdir(exist_ok=True)
            link = _link(staged / "adapter_model.safetensors", file)
            (staged / "adapter_config.json").write_text(json.dumps(self._settings()))
            adapter = self._core.adapter(label(version), version + 1, str(staged))  # vLLM numbers adapters from 1
            self._core.add_adapter(adapter)
            self._adapters[slot] = adapter
            try:
                if self._prove:
                    _require_same(
                        self._core.adapter_differs(str(link), version + 1, self._lora.alpha / self._lora.rank), version
                    )
            except FingerprintError:
                self.unload(slot)
                raise
            self._probes[slot] = file.probe
            return file.fingerprint

    def probe(self, slot: int) -> Probe | None:
        """Return the probe of the adapter in a slot."""
        return self._probes[slot]

    def unload(self, slot: int) -> None:
        """Remove the adapter, to make room for another."""
        adapter = self._adapters[slot]
        self._adapters[slot] = None
        if adapter is not None:
            self._core.remove_adapter(adapter.lora_int_id)

    def adapter(self, slot: int) -> Any:
        """Return the adapter in a slot."""
        return self._adapters[slot]

    def _settings(self) -> dict[str, Any]:
        """Return the settings of an adapter as `peft` writes them."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": list(self._lora.targets),
            "bias": "none",
        }


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder of links to published files: vLLM reads versions from folders."""
    return tempfile.TemporaryDirectory(prefix="dora-rl-vllm-")


def _link(path: Path, file: PublishedFile) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to(file.path)
    return path


def _require_same(differing: str, version: Version) -> None:
    if differing:
        raise FingerprintError(
            f"vLLM serves other weights than were published as version {version}: '{differing}' differs"
        )
