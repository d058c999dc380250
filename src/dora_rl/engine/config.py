"""Configuration of a rollout engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dora_rl.core.config import Config


class VllmConfig(Config):
    """Where `kind` is "vllm": what only vLLM has. It also goes by slots, max_requests, max_context and kv_bytes."""

    enforce_eager: bool | None = None
    """Compile nothing; unset: on a CPU, where compiling takes minutes."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices of one instance."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a device's memory for weights and KV together; unset: the KV gets kv_bytes."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens in a block of vLLM's cache; unset: 32 on a CPU, elsewhere vLLM's own."""
    move_kv: bool = True
    """A request that moves takes its KV along, through a connector; otherwise it is prefilled again."""
    prove: bool = True
    """After each load, read the weights back from vLLM and compare them with what was published, bit by bit."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Any other of vLLM's engine arguments, by its name there."""


class EngineConfig(Config):
    """One rollout engine."""

    kind: Literal["builtin", "vllm"] = "builtin"
    """`vllm` needs dora-rl[vllm]; with a LoRA adapter it serves K + 1 versions in one batch."""

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
    """Threads that compute; 0 takes as many as torch would, in a run those that it is given of the run's `threads`."""
    probe_tolerance: float | None = Field(default=None, gt=0)
    """How far log-probs of the probe may be from the trainer's before a slot is refused, in nats; unset: by dtype."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """`native` compiles C++ kernels for this CPU; `torch` runs everywhere; `auto` takes the first that can be had."""
    vllm: VllmConfig = VllmConfig()
    """Where `kind` is "vllm"."""
