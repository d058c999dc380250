"""Checkpoints: a folder that users can load, and beside it the state that a run goes on from.

    version-00000012.0/
      policy/      what `AutoModelForCausalLM.from_pretrained` loads, with the tokenizer; LoRA is merged in
      adapter/     the adapter alone, as `peft` writes it (LoRA only)
      state/       trained weights, moments and random states, a safetensors file for each process
      state.json   version, updates, figures of the last step, shapes of the state, digests of all other files

Invariants:
- a folder under its final name is whole. It is written under another name, forced to disk, and renamed; what is
  deleted is renamed away first. So a kill at any moment leaves the last good checkpoint, and at most litter that the
  next save sweeps up;
- a version saved again (after going back to an earlier one) gets the next number behind the dot; nothing is
  overwritten. The checkpoint to go on from is the last by (version, number);
- a state whose files are not byte for byte those that were written is refused before it is parsed;
- the state does not depend on the number of processes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dora_rl.core.durable_files import sync, sync_tree
from dora_rl.core.errors import CheckpointError
from dora_rl.core.file_digests import tree_digests
from dora_rl.core.types import Record, Version
from dora_rl.trainer import sharded_state as shards
from dora_rl.trainer import trainable as adapter
from dora_rl.trainer.trainer import Trainer

_NAME = re.compile(r"version-(\d{8})\.(\d+)")
_LITTER = ".partial-"
DAMAGED = "damaged-"
"""Before the name of a checkpoint that could not be read."""


class Restored(Record, frozen=True, kw_only=True):
    """Where a run goes on."""

    version: Version
    last_step: dict[str, Any] | None
    """What was handed to `save`: the figures of the step that made this version."""


def save(
    folder: Path, trainer: Trainer, *, last_step: Mapping[str, Any] | None = None, tokenizer: Any = None, keep: int = 2
) -> Path:
    """Write a checkpoint of the trainer's version, and delete all but the newest `keep`. All processes call this."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((number for version, number in _used(folder) if version == trainer.version), default=-1)
    final = folder / f"version-{trainer.version:08d}.{number}"
    staged = folder / f"{_LITTER}{final.name}"
    writes = trainer.rank_group.rank == 0
    if writes:
        _sweep(folder)
        staged.mkdir()
    trainer.rank_group.barrier()
    save_policy(staged / "policy", trainer, tokenizer)
    if writes and trainer.adapted is not None:
        adapter_state = adapter.trained_state(trainer.model, trainer.adapted)
        trainer.adapted.save_pretrained(staged / "adapter", state_dict=adapter_state)
    state = _state(trainer)
    (staged / "state").mkdir(exist_ok=True)
    shards.save(staged / "state", state, trainer.rank_group.rank, own=_own(trainer))
    trainer.rank_group.barrier()
    if writes:
        record = {
            "version": trainer.version,
            "updates": trainer.optimiser.updates,
            "last_step": last_step,
            "shapes": {name: list(tensor.shape) for name, tensor in state.items()},
            "files": msgspec.to_builtins(tree_digests(staged)),
        }
        (staged / "state.json").write_text(json.dumps(record, indent=1))
        sync_tree(staged)
        staged.rename(final)
        sync(folder)
        for _, _, old in _all(folder)[:-keep]:
            _delete(old)
    trainer.rank_group.barrier()
    return final


def latest(folder: Path) -> Path | None:
    """The checkpoint to go on from."""
    found = _all(folder)
    return found[-1][2] if found else None


def versions(folder: Path) -> list[Version]:
    """The versions that can be gone back to, oldest first."""
    return [version for version, _, _ in _all(folder)]


def restore(path: Path, trainer: Trainer) -> Restored:
    """Put a checkpoint's state into a trainer with the same model and settings, on any number of processes."""
    try:
        record = json.loads((path / "state.json").read_text())
        if _of_state(record["files"]) != _of_state(msgspec.to_builtins(tree_digests(path / "state", "state/"))):
            raise CheckpointError(f"'{path}' is damaged: its files are not those that were written")
        stored = {str(name): tuple(shape) for name, shape in record["shapes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not a checkpoint: {error}") from error
    theirs = {name: shape for name, shape in stored.items() if name.startswith("weights.")}
    ours = {name: tuple(tensor.shape) for name, tensor in _state(trainer).items() if name.startswith("weights.")}
    if theirs != ours:
        name = min(set(theirs.items()) ^ set(ours.items()))[0]
        raise CheckpointError(f"'{path}' is of another model: they differ in '{name.partition('.')[2]}'")
    trainer.abandon()
    trainer.optimiser.allocate({name.split(".", 2)[2] for name in stored if name.startswith("moment.")})
    own = _own(trainer)
    wanted = {name: value for name, value in _state(trainer).items() if name in stored or name == own}
    missing = shards.load(path / "state", wanted, trainer.rank_group.rank, trainer.rank_group.size)
    if missing - {own}:
        raise CheckpointError(f"'{path}' is damaged: '{min(missing - {own})}' is not in it")
    trainer.optimiser.take_moments({name: value for name, value in wanted.items() if name.startswith("moment.")})
    if own not in missing:
        torch.set_rng_state(wanted[own])
    trainer.optimiser.updates = record["updates"]
    trainer.optimiser.refresh()
    trainer.version = record["version"]
    return Restored(version=record["version"], last_step=record["last_step"])


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors that a run goes on from, by name. The weights among them are the trainer's own memory."""
    weights = adapter.trained_state(trainer.model, trainer.adapted)
    return {
        **{f"weights.{name}": tensor for name, tensor in weights.items()},
        **trainer.optimiser.moments(),
        _own(trainer): torch.get_rng_state(),
    }


def _own(trainer: Trainer) -> str:
    """The random state, which each process has for itself."""
    return f"random.{trainer.rank_group.rank}"


def save_policy(path: Path, trainer: Trainer, tokenizer: Any) -> None:
    """The folder for users. Gathering takes all processes; one keeps the result and writes."""
    merged = adapter.merged_state(trainer.model, trainer.adapted)
    if trainer.rank_group.rank != 0:
        deque(merged, maxlen=0)
        return
    trainer.model.save_pretrained(path, state_dict=dict(merged))
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def _all(folder: Path) -> list[tuple[Version, int, Path]]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = []
    for entry in folder.iterdir():
        name = _NAME.fullmatch(entry.name)
        if name:
            found.append((int(name[1]), int(name[2]), entry))
    return sorted(found)


def _used(folder: Path) -> list[tuple[Version, int]]:
    """Names that were given, also to checkpoints that were set aside: no name ever means two checkpoints."""
    names = [_NAME.fullmatch(entry.name.removeprefix(DAMAGED)) for entry in folder.iterdir()]
    return [(int(name[1]), int(name[2])) for name in names if name]


def _of_state(files: Mapping[str, Any]) -> dict[str, Any]:
    """Of the files that are parsed when a run goes on."""
    return {name: digest for name, digest in files.items() if name.startswith("state/")}


def _sweep(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name.startswith(_LITTER):
            shutil.rmtree(entry)


def _delete(path: Path) -> None:
    litter = path.with_name(f"{_LITTER}{path.name}")
    path.rename(litter)
    shutil.rmtree(litter)
