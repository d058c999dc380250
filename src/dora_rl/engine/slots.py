"""Slots of the built-in engine: each holds the weights of one version and is loaded while others decode.

Invariants:
- a slot serves one version, or none; what it serves changes only between two steps;
- a separate thread loads: it maps the file, touches its pages, checks the shape of each tensor and computes the probe.
  Decoding continues meanwhile, in this slot (in-flight update) or in others. If there is nothing to decode, the calling
  thread loads;
- the runner that is probed is the one that will serve; a runner that differs from the trainer never serves.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from dora_rl.core.activities import IdleCause, IdleReason
from dora_rl.core.errors import DoraError

if TYPE_CHECKING:
    from dora_rl.core.interfaces import WeightSource
    from dora_rl.core.probe import ProbeResult
    from dora_rl.core.time_accounting import TimeAccount
    from dora_rl.core.types import Fingerprint, Nanoseconds, SlotId, Version
    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.probe import Prober
    from dora_rl.engine.runner import MakeRunner, Runner

PAGE = 4096
STARTING = IdleCause(reason=IdleReason.STARTING)


class Loading:
    """The load of a version into a slot."""

    def __init__(
        self,
        slot: SlotId,
        version: Version,
        weights: WeightSource,
        make: MakeRunner,
        prober: Prober,
        *,
        now: bool,
        threads: int,
    ) -> None:
        self.version = version
        self.runner: Runner | None = None
        self.fingerprint: Fingerprint = ""
        self.probe: ProbeResult | None = None
        self.error: DoraError | None = None
        self._slot = slot
        self._prober = prober
        self._thread: threading.Thread | None = None
        if now:
            self._load(weights, make, threads)
        else:
            # Made only where it is started: a thread that never runs keeps its target, and so the weights.
            self._thread = threading.Thread(target=self._load, args=(weights, make, threads), daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the load has succeeded or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the load is done."""
        if self._thread is not None:
            self._thread.join()

    def _load(self, weights: WeightSource, make: MakeRunner, threads: int) -> None:
        try:
            tensors = weights.tensors(self.version)
            for tensor in tensors.values():
                _touch(tensor)
            self.fingerprint = weights.fingerprint(self.version)
            runner = make(tensors)
            probe = weights.probe(self.version)
            if probe is not None:
                self.probe = self._prober.check(runner, probe, self._slot, self.version, threads)
            self.runner = runner
        except DoraError as error:
            self.error = error
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            self.error = DoraError(f"version {self.version} can't be loaded: {error}")


class EngineSlot:
    """Weights of one version, its batch and its account."""

    def __init__(self, index: int, batch: DecodeBatch, account: TimeAccount) -> None:
        self.index = index
        self.batch = batch
        self.account = account
        self.version: Version | None = None
        self.fingerprint: Fingerprint = ""
        self.runner: Runner | None = None
        self.loading: Loading | None = None
        self.pace: Nanoseconds = 0
        """Time per token in the last decode call."""
        self.idle = STARTING
        """Why the slot is idle, when it is; `STARTING` until a cause is given."""


def _touch(tensor: Any) -> None:
    """Read a byte of each page, so that the first decode step does not fault them in one by one."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        tensor.view(-1).view(torch.uint8)[::PAGE].sum()
