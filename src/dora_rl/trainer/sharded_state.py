"""The state of a trainer in safetensors files, one per rank.

    shard-00000.safetensors   the shards of rank 0; tensors that are not sharded are only in this file

Invariants:
- a sharded tensor is the concatenation of its shards along the first dimension, in the order of the ranks, so any
  number of ranks can read what any other number has written;
- reading a file executes no code from it.
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
    """Write the shards of this rank, and its own tensors, whose names start with `own`."""
    shards = {
        name: _local_shard(tensor).detach().to("cpu").contiguous()
        for name, tensor in state.items()
        if rank == 0 or isinstance(tensor, DTensor) or name.startswith(own)
    }
    save_file(shards, folder / f"shard-{rank:05d}.safetensors")


def load(folder: Path, wanted: Mapping[str, Tensor], rank: int, size: int) -> set[str]:
    """Fill the wanted tensors from the files of any number of ranks; return the names that the files do not have."""
    missing = set()
    with ExitStack() as stack:
        try:
            paths = sorted(folder.glob("shard-*.safetensors"))
            files: list[Any] = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            names = [set(file.keys()) for file in files]
            for name, tensor in wanted.items():
                shards = [file.get_tensor(name) for file, held in zip(files, names, strict=True) if name in held]
                if shards:
                    _fill(tensor, shards, rank, size)
                else:
                    missing.add(name)
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"'{folder}' is damaged: {error}") from error
    return missing


def _fill(tensor: Tensor, shards: list[Tensor], rank: int, size: int) -> None:
    values = shards[0] if len(shards) == 1 else torch.cat(shards)
    if isinstance(tensor, DTensor):
        chunks = values.chunk(size)
        values = chunks[rank] if rank < len(chunks) else values[:0]
    _local_shard(tensor).copy_(values)


def _local_shard(tensor: Tensor) -> Tensor:
    """The shard of a tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert tensor.placements == (Shard(0),), f"the tensor is not sharded along its first dimension: {tensor.placements}"
    return tensor.to_local()
