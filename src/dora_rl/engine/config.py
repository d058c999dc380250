"""Configuration of a rollout engine, and the engines that there are (`engine.registry` says how to add one)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from dora_rl.core.config import Config, NameOf
from dora_rl.engine.vllm.config import VllmConfig

ENGINES: Mapping[str, str] = {
    "builtin": "dora_rl.engine.builtin:BuiltinFactory",
    "vllm": "dora_rl.engine.vllm.factory:VllmFactory",
}
"""The `EngineFactory` of each kind, as `module:class`: it is imported when an engine of that kind is asked for."""


class EngineConfig(Config):
    """One rollout engine."""

    kind: Annotated[str, NameOf("engine", ENGINES)] = "builtin"
    """`vllm` needs dora-rl[vllm]; with a LoRA adapter it serves K + 1 versions in one batch."""

    slots: int = Field(default=1, ge=1)
    """Number of versions that an engine can serve at once."""
    max_requests: int = Field(default=64, ge=1)
    """Number of requests that may run at once, over all slots."""
    max_context: int = Field(default=4096, ge=2)
    """Longest prompt and response together, in tokens; the model's own limit applies too."""
    kv_bytes: int = Field(default=2 << 30, ge=1)
    """Hard cap on the memory of the KV cache, in bytes."""
    host_bytes: int = Field(default=2 << 30, ge=0)
    """Hard cap on the host memory for requests that were pre-empted or moved here, in bytes."""
    block_size: int = Field(default=16, ge=1)
    """Tokens in a block of the KV cache. With 16, a request wastes 8 tokens on average and block tables stay short."""
    prefill_chunk: int = Field(default=256, ge=1)
    """Most prompt tokens that one step computes, beside the decoding tokens."""
    stream_every: int = Field(default=16, ge=1)
    """Tokens of a request between two of its reports."""
    stretch: int = Field(default=16, ge=1)
    """Most decode steps in one call of the native kernels, while there is nothing to do but decode."""
    threads: int = Field(default=0, ge=0)
    """Threads that compute; 0 takes as many as torch would, in a run the instance's share of the run's `threads`."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """Difference of the probe's log-probs, in nats, above which a slot is refused; unset: depends on the dtype."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """`native` compiles C++ kernels for this CPU; `torch` runs everywhere; `auto` takes the first that is available."""
    vllm: VllmConfig = VllmConfig()
    """Read if `kind` is "vllm"."""
