"""What must hold after a run, whatever faults it had."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from dora_rl.apps.audit import audited
from dora_rl.runtime.run_dir import RunDir
from dora_rl.trainer import checkpoint
from tests.runtime.host import Supervisor, alive
from tests.runtime.making import PATIENCE


def broken(supervisor: Supervisor, outcome: dict[str, Any], steps: int) -> list[str]:
    """Promises that a finished run has not kept."""
    folder = supervisor.folder
    found = list(audited(folder).problems)
    if outcome.get("code") != 0:
        found.append(f"it ended with {outcome}; see {folder.path}")
        return found
    audit = audited(folder)
    if not audit.finished or audit.steps != steps:
        found.append(f"{audit.steps} steps are done of {steps}")
    if checkpoint.versions(folder.checkpoints)[-1:] != [steps]:
        found.append(f"the last checkpoints are {checkpoint.versions(folder.checkpoints)}, not {steps}")
    return found + leftovers(supervisor, outcome)


def leftovers(supervisor: Supervisor, outcome: dict[str, Any]) -> list[str]:
    """Processes, shared memory, descriptors and half-written files that a run has left behind."""
    everybody = supervisor.everybody()
    found = [f"process {pid} is still alive" for pid in everybody if alive(pid)]
    for segment in Path("/dev/shm").glob("dora-rl-*"):
        owner = segment.name.removeprefix("dora-rl-kv-").split("-")[0]
        mine = owner.isdigit() and int(owner) in everybody
        if mine or segment.name == f"dora-rl-{supervisor.folder.memory}":
            found.append(f"{segment} is left")
    found += [f"descriptor {one} is left open" for one in outcome.get("leaked", [])]
    litter = [*supervisor.folder.path.rglob(".staged-*"), *supervisor.folder.path.rglob(".partial-*")]
    return found + [f"{path} is left half-written" for path in litter]


def wait_for_events(supervisor: Supervisor, count: int) -> bool:
    """Wait until this number of events is on disk; False if the run ends before."""
    return wait_for(supervisor, lambda: supervisor.events() >= count)


def wait_for(supervisor: Supervisor, happened: Callable[[], bool]) -> bool:
    """Wait until something has happened; False if the run ends before."""
    end = time.monotonic() + PATIENCE
    while not happened():
        if not supervisor.alive():
            return happened()
        assert time.monotonic() < end, f"nothing moves; see {supervisor.folder.path}"
        time.sleep(0.003)
    return True


def fault_happened(supervisor: Supervisor, fault: str) -> bool:
    """Whether a fault of the machine (see `faults`) has happened at least once."""
    noted = supervisor.folder.logs / "faults"
    return noted.exists() and fault in noted.read_text().split()


def strike(
    supervisor: Supervisor, worker_id: str | None, dice: random.Random, number: int = signal.SIGKILL, most: int = 40
) -> bool:
    """Send a signal to a process at a random moment, at most `most` events from now; False if there was no process."""
    later = supervisor.events() + dice.randint(1, most)
    return wait_for_events(supervisor, later) and supervisor.signal(number, worker_id)


def final_weights(folder: RunDir) -> dict[str, Any]:
    """The final policy of a run."""
    path = checkpoint.latest(folder.checkpoints)
    assert path is not None
    tensors: dict[str, Any] = load_file(path / "policy" / "model.safetensors")
    return tensors
