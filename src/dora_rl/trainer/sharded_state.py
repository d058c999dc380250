"""The state of a trainer as safetensors, one file for each process.

    shard-00000.safetensors   what process 0 holds; tensors that are not sharded are in this one only

Invariants:
- a sharded tensor is the concatenation of its parts along its first dimension, in the order of the processes, so any
  number of processes can read what any other number has written;
- reading executes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dora_rl.core.errors import CheckpointError


def save(folder: Path, state: Mapping[str, Tensor], rank: int, own: str) -> None:
    """Write this process's part; names that begin with `own` are its alone."""
    parts = {
        name: _part(tensor).detach().to("cpu").contiguous()
        for name, tensor in state.items()
        if rank == 0 or isinstance(tensor, DTensor) or name.startswith(own)
    }
    save_file(parts, folder / f"shard-{rank:05d}.safetensors")


def load(folder: Path, wanted: Mapping[str, Tensor], rank: int, size: int) -> set[str]:
    """Fill these tensors from what some processes have written; the names of those that are not there."""
    missing = set()
    with ExitStack() as stack:
        try:
            paths = sorted(folder.glob("shard-*.safetensors"))
            files: list[Any] = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            names = [set(file.keys()) for file in files]
            for name, tensor in wanted.items():
                parts = [file.get_tensor(name) for file, there in zip(files, names, strict=True) if name in there]
                if parts:
                    _fill(tensor, parts, rank, size)
                else:
                    missing.add(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"'{folder}' is damaged: {error}") from error
    return missing


def _fill(tensor: Tensor, parts: list[Tensor], rank: int, size: int) -> None:
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    if isinstance(tensor, DTensor):
        pieces = found.chunk(size)
        found = pieces[rank] if rank < len(pieces) else found[:0]
    _part(tensor).copy_(found)


def _part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert tensor.placements == (Shard(0),), f"sharded otherwise than along the first dimension: {tensor.placements}"
    return tensor.to_local()
