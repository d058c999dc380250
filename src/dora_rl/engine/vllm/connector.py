"""KV that moves between instances: a KV connector for vLLM, which exports and imports the KV of requests.

    leave    the engine marks the request as wanted and withdraws it; vLLM calls the connector before it frees the
             blocks, and the connector copies them to the host
    arrive   the engine submits the request and its KV; vLLM asks the connector how many tokens have KV, gives it
             blocks, and lets it fill them before the forward pass

Invariants:
- whole blocks are copied, in the order of their tokens; only tokens that the scheduler counts as computed are taken, so
  a request that was pre-empted leaves without KV;
- vLLM's scheduler and worker are in this process (one device), so the connector never crosses a process boundary; the
  bundle of a request does, as plain bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from dora_rl.engine.kv import KvShape


class Kv(NamedTuple):
    """The KV of the first tokens of a request."""

    blocks: Tensor
    """[layers, blocks, ...], on the host"""
    tokens: int


class Transit:
    """State that the engine and the connector share."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        """Requests whose KV the engine wants, by their names in vLLM's scheduler."""
        self.left: dict[str, Kv] = {}
        """KV of requests that have left, by the same names."""
        self.arriving: dict[str, Kv] = {}
        """KV of requests that have arrived, until it is in vLLM's blocks."""
        self.caches: list[Tensor] = []
        """KV caches of the layers, each with the blocks in its first dimension."""

    def shape(self) -> KvShape:
        """Return the dimensions of a token's KV in this vLLM."""
        blocks = self.caches[0]
        heads, size, width = blocks.shape[1:]
        return KvShape(len(self.caches), heads, width, size, str(blocks.dtype).removeprefix("torch."))

    def read(self, memory: memoryview, blocks: int) -> Tensor:
        """Return a tensor over the KV in the memory of a bundle."""
        first = self.caches[0]
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(first.dtype).view(len(self.caches), blocks, *first.shape[1:])


TRANSIT = Transit()
"""The state of the one engine in this process: vLLM makes the connectors itself, so they share a global."""


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """KV that a step has to load."""

    loads: list[tuple[str, list[int], int]] = field(default_factory=list)
    """Name of the request, its blocks, and the first block to fill."""


class Connector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector; vLLM makes one for its scheduler and one for its worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size: int = vllm_config.cache_config.block_size
        self._loads: dict[str, tuple[str, list[int], int]] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """False: vLLM computes missing KV again."""
        return False

    # Methods for the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens with imported KV beyond those whose KV vLLM has itself."""
        kv = TRANSIT.arriving.get(_name(request))
        known = 0 if kv is None else min(kv.tokens, request.num_tokens - 1)
        return max(0, known - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Remember the allocated blocks, to be filled in the next step."""
        if num_external_tokens:
            name = _name(request)
            known = min(TRANSIT.arriving[name].tokens, request.num_tokens - 1)
            first = (known - num_external_tokens) // self._size
            self._loads[request.request_id] = (name, list(blocks.get_block_ids()[0]), first)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        """What the step has to put in place."""
        loads, self._loads = list(self._loads.values()), {}
        return Loads(loads)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """The last chance to take a request's KV."""
        if request.request_id in TRANSIT.wanted:
            TRANSIT.wanted.discard(request.request_id)
            tokens = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
            count = -(-tokens // self._size)
            if 0 < count <= len(block_ids):
                taken = torch.stack([cache[block_ids[:count]].to("cpu") for cache in TRANSIT.caches])
                TRANSIT.left[request.request_id] = Kv(taken, tokens)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Do the same for models with several kinds of layers; with more than one kind, the KV is not taken."""
        return self.request_finished(request, block_ids[0] if len(block_ids) == 1 else [])

    # Methods for the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Keep references to the KV caches."""
        TRANSIT.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:  # noqa: ARG002
        """Fill the blocks of requests that have arrived."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for name, blocks, first in metadata.loads:
            kv = TRANSIT.arriving[name]
            target = blocks[first : kv.blocks.shape[1]]
            for cache, source in zip(TRANSIT.caches, kv.blocks, strict=True):
                cache[target] = source[first:].to(cache.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all KV is loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_: Any) -> None:
        """Do nothing: KV is copied when a request leaves."""

    def wait_for_save(self) -> None:
        """Do nothing."""


def _name(request: Any) -> str:
    params = request.kv_transfer_params or {}
    return str(params.get("dora_kv", ""))
