"""Checkpoints: a model that users can load, and the state from which a run resumes.

    version-00000012.0/
      policy/      what `AutoModelForCausalLM.from_pretrained` loads, with the tokenizer; LoRA is merged in
      adapter/     the adapter alone, as `peft` writes it (LoRA only)
      state/       trained weights, moments and random states, one safetensors file per rank
      state.json   version, updates, report of the last step, shape of each tensor in state/, digests of all other files

Invariants:
- a folder under its final name is complete: it is written under another name, synced to disk and renamed. A folder is
  renamed before it is deleted. So a kill at any moment leaves the last good checkpoint, and at most a partial folder
  that the next save removes;
- a version that is saved again (after a return to an earlier one) gets the next number after the dot; nothing is
  overwritten. A run resumes from the last checkpoint by (version, number);
- a state is refused before it is parsed if its files are not byte for byte those that were written;
- the state does not depend on the number of ranks.
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
from dora_rl.trainer import sharded_state, trainable
from dora_rl.trainer.trainer import Trainer

_NAME = re.compile(r"version-(\d{8})\.(\d+)")
_PARTIAL = ".partial-"
DAMAGED = "damaged-"
"""Prefix of the name of a checkpoint that could not be read."""


class Restored(Record, frozen=True, kw_only=True):
    """What a checkpoint holds besides tensors."""

    version: Version
    last_step: dict[str, Any] | None
    """The argument of `save`: the report of the step that produced this version."""


def save(
    folder: Path, trainer: Trainer, *, last_step: Mapping[str, Any] | None = None, tokenizer: Any = None, keep: int = 2
) -> Path:
    """Write a checkpoint of the trainer's version, and delete all but the newest `keep`. All ranks call this."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + max((number for version, number in _used(folder) if version == trainer.version), default=-1)
    final = folder / f"version-{trainer.version:08d}.{number}"
    staged = folder / f"{_PARTIAL}{final.name}"
    writes = trainer.rank_group.rank == 0
    if writes:
        delete_partial(folder)
        staged.mkdir()
    trainer.rank_group.barrier()
    save_policy(staged / "policy", trainer, tokenizer)
    if writes and trainer.peft_model is not None:
        adapter_state = trainable.trained_state(trainer.model, trainer.peft_model)
        trainer.peft_model.save_pretrained(staged / "adapter", state_dict=adapter_state)
    state = _state(trainer)
    (staged / "state").mkdir(exist_ok=True)
    sharded_state.save(staged / "state", state, trainer.rank_group.rank, own=_random_state_name(trainer))
    trainer.rank_group.barrier()
    if writes:
        record = {
            "version": trainer.version,
            "updates": trainer.optimiser.updates,
            "last_step": last_step,
            "tensors": {name: list(tensor.shape) for name, tensor in state.items()},
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
    """The checkpoint to resume from."""
    checkpoints = _all(folder)
    return checkpoints[-1][2] if checkpoints else None


def versions(folder: Path) -> list[Version]:
    """The versions that have a checkpoint, oldest first."""
    return [version for version, _, _ in _all(folder)]


def restore(path: Path, trainer: Trainer) -> Restored:
    """Load a checkpoint's state into a trainer with the same model and settings, on any number of ranks."""
    try:
        record = json.loads((path / "state.json").read_text())
        if _state_files(record["files"]) != _state_files(msgspec.to_builtins(tree_digests(path / "state", "state/"))):
            raise CheckpointError(f"'{path}' is damaged: its files are not those that were written")
        stored = {str(name): tuple(shape) for name, shape in record["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not a checkpoint: {error}") from error
    theirs = {name: shape for name, shape in stored.items() if name.startswith("weights.")}
    ours = {name: tuple(tensor.shape) for name, tensor in _state(trainer).items() if name.startswith("weights.")}
    if theirs != ours:
        name = min(set(theirs.items()) ^ set(ours.items()))[0]
        raise CheckpointError(f"'{path}' is of another model: they differ in '{name.partition('.')[2]}'")
    trainer.abandon()
    trainer.optimiser.allocate({name.split(".", 2)[2] for name in stored if name.startswith("moment.")})
    own = _random_state_name(trainer)
    wanted = {name: value for name, value in _state(trainer).items() if name in stored or name == own}
    missing = sharded_state.load(path / "state", wanted, trainer.rank_group.rank, trainer.rank_group.size)
    if missing - {own}:
        raise CheckpointError(f"'{path}' is damaged: '{min(missing - {own})}' is not in it")
    trainer.optimiser.load_moments({name: value for name, value in wanted.items() if name.startswith("moment.")})
    if own not in missing:
        torch.set_rng_state(wanted[own])
    trainer.optimiser.updates = record["updates"]
    trainer.optimiser.refresh()
    trainer.version = record["version"]
    return Restored(version=record["version"], last_step=record["last_step"])


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """All tensors from which a run resumes, by name. The weights among them are the trainer's own, not copies."""
    weights = trainable.trained_state(trainer.model, trainer.peft_model)
    return {
        **{f"weights.{name}": tensor for name, tensor in weights.items()},
        **trainer.optimiser.moments(),
        _random_state_name(trainer): torch.get_rng_state(),
    }


def _random_state_name(trainer: Trainer) -> str:
    """The name of the random state, of which each rank has its own."""
    return f"random.{trainer.rank_group.rank}"


def save_policy(path: Path, trainer: Trainer, tokenizer: Any) -> None:
    """Write the model for users. All ranks take part in gathering the tensors; rank 0 writes them."""
    merged = trainable.merged_state(trainer.model, trainer.peft_model)
    if trainer.rank_group.rank != 0:
        deque(merged, maxlen=0)
        return
    trainer.model.save_pretrained(path, state_dict=dict(merged))
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def _all(folder: Path) -> list[tuple[Version, int, Path]]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    checkpoints = []
    for entry in folder.iterdir():
        name = _NAME.fullmatch(entry.name)
        if name:
            checkpoints.append((int(name[1]), int(name[2]), entry))
    return sorted(checkpoints)


def _used(folder: Path) -> list[tuple[Version, int]]:
    """Names in use, including those of damaged checkpoints: a name never refers to two checkpoints."""
    names = [_NAME.fullmatch(entry.name.removeprefix(DAMAGED)) for entry in folder.iterdir()]
    return [(int(name[1]), int(name[2])) for name in names if name]


def _state_files(files: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the files that are parsed when a run resumes."""
    return {name: digest for name, digest in files.items() if name.startswith("state/")}


def delete_partial(folder: Path) -> None:
    """Delete what a trainer that was killed left behind while it wrote or deleted a checkpoint."""
    for entry in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(entry)


def _delete(path: Path) -> None:
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    path.rename(partial)
    shutil.rmtree(partial)
