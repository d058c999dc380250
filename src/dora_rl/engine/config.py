"""Configuration of the built-in engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dora_rl.core.config import Config


class EngineConfig(Config):
    """One rollout engine."""

    slots: int = Field(default=1, ge=1)
    """How many versions it can serve at once."""
    max_requests: int = Field(default=64, ge=1)
    """How many requests may run at once, over all slots."""
    max_context: int = Field(default=4096, ge=2)
    """Longest prompt and response together, in tokens; the model's own limit counts too."""
    kv_bytes: int = Field(default=2 << 30, ge=1)
    """Hard cap on the memory of the KV cache, in bytes."""
    host_bytes: int = Field(default=2 << 30, ge=0)
    """Hard cap on the host memory for requests that were pre-empted or moved here, in bytes."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in a block of the KV cache. 16 wastes half a block a request and keeps tables short."""
    prefill_chunk: int = Field(default=256, ge=1)
    """Most prompt tokens computed in one step, beside the decoding ones."""
    stream_every: int = Field(default=16, ge=1)
    """Tokens of a request between two of its reports."""
    stretch: int = Field(default=16, ge=1)
    """Most decode steps in one call of the native kernels, while nothing but decoding is to be done."""
    threads: int = Field(default=0, ge=0)
    """Threads that compute; 0 takes as many as torch would."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """`native` compiles C++ kernels for this CPU; `torch` runs everywhere; `auto` takes the first that can be had."""
