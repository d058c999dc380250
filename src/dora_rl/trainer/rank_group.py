"""The ranks of the trainer: one process or several, with the same code.

Every rank is given the same groups and computes its own micro-batches of them; parameters, gradients and optimiser
state are sharded by FSDP2. With one rank nothing is sharded, and no process group is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = TypeVar("T")


class RankGroup(NamedTuple):
    """The ranks that train together, as one of them sees it."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    def share(self, items: Sequence[T]) -> list[T | None]:
        """The items of this rank: every size-th, padded with None so that all ranks have equally many and their
        collectives match."""
        rounds = -(-len(items) // self.size)
        indices = range(self.rank, rounds * self.size, self.size)
        return [items[index] if index < len(items) else None for index in indices]

    def sum(self, values: Tensor) -> Tensor:
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def union(self, items: Sequence[int]) -> tuple[int, ...]:
        """The items of all ranks, sorted. Items are not negative."""
        if self.size == 1:
            return tuple(sorted(set(items)))
        longest = int(self.max(torch.tensor(len(items))))
        if not longest:
            return ()
        # All ranks must send equally many items: a rank with fewer repeats its first item, or sends -1 if it has none.
        mine = torch.full((longest,), items[0] if items else -1, dtype=torch.int64, device=self._device)
        mine[: len(items)] = torch.tensor(list(items), dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return tuple(sorted(set(torch.cat(gathered).tolist()) - {-1}))

    def any(self, fact: bool) -> bool:
        """Whether the fact is true on at least one rank."""
        return bool(self.max(torch.tensor(int(fact))))

    def _all_reduce(self, values: Tensor, operation: Any) -> Tensor:
        """Reduce over all ranks; the result is on the device of the values."""
        if self.size == 1:
            return values
        shared = values.to(self._device)
        dist.all_reduce(shared, operation)
        return shared.to(values.device)

    @property
    def _device(self) -> str:
        """The device of tensors that the backend can exchange."""
        return "cuda" if dist.get_backend() == "nccl" else "cpu"

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def join_from_environment(device: str, timeout_s: float = 600.0) -> RankGroup:
    """Join the rank group that `torchrun` describes in the environment; without it, this process trains alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return RankGroup()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return RankGroup(dist.get_rank(), size, init_device_mesh(device, (size,)))


def join_from_store(device: str, store: Any, rank: int, size: int, timeout_s: float = 600.0) -> RankGroup:
    """Join the rank group of the processes that share a store."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return RankGroup(rank, size, init_device_mesh(device, (size,)))


def shard(policy: nn.Module, layers: Sequence[nn.Module], rank_group: RankGroup, precision: str) -> None:
    """Shard a policy over the ranks, layer by layer."""
    if rank_group.mesh is None:
        return
    mixed = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bfloat16" else None, reduce_dtype=torch.float32
    )
    for layer in layers:
        fully_shard(layer, mesh=rank_group.mesh, mp_policy=mixed)
    fully_shard(policy, mesh=rank_group.mesh, mp_policy=mixed)
