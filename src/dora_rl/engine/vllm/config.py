"""Settings that only vLLM has."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from dora_rl.core.config import Config


class VllmConfig(Config):
    """Settings that only vLLM has. It also reads slots, max_requests, max_context, kv_bytes, stream_every, threads."""

    enforce_eager: bool | None = None
    """Compile nothing; unset: on a CPU, where compiling takes minutes."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices of one instance."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory for weights and KV together; unset: the KV cache gets kv_bytes."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens in a block of vLLM's KV cache; unset: 32 on a CPU, elsewhere vLLM's own default."""
    move_kv: bool = True
    """A request that moves takes its KV along, through a connector; otherwise it is prefilled again."""
    prove: bool = True
    """After each load, read the weights back from vLLM and compare them with the published ones, bit by bit."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments, under vLLM's name."""
