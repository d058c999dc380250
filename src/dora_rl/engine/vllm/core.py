"""Drives vLLM through its public interface; no other module calls it.

The engine runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and advances only when `step` is called, so all of
its outputs are known then. The process may be a fork that has torch imported, as long as no device was initialised
before the fork: this holds for rollout workers, whose parent computes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dora_rl.core.errors import ConfigError
from dora_rl.engine.vllm.version_check import require

if TYPE_CHECKING:
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.requests import Sampling
    from dora_rl.engine.vllm.connector import Transit
    from dora_rl.models.loading import ModelConfig

_CPU_BLOCK = 32
"""vLLM's CPU kernels require multiples of 32; its own default of 128 would share no prompt shorter than that."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can allocate."""
_EXTENSION = "dora_rl.engine.vllm.worker.Worker"
_CONNECTOR = "dora_rl.engine.vllm.connector"


class Lora(NamedTuple):
    """Rank, scale and target modules of the adapters."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Last names of the adapted modules."""


class Output(NamedTuple):
    """The result of one step for one request."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    """Log-probs under the distribution that was sampled from."""
    cached: int
    """Tokens of the prompt whose KV vLLM already had."""
    reason: str | None
    """`stop`, `length` or another reason for the end; None: the request continues."""
    versions: frozenset[str]
    """Versions of the weights, or the adapter, that sampled the response; known at its end."""
    prompt: tuple[float, ...] = ()
    """The model's log-probs of all tokens of the prompt but the first, if requested."""


@dataclass(slots=True)
class Counters:
    """vLLM's counters since it began."""

    running: int = 0
    usage: float = 0.0
    """Share of the KV cache that is in use."""
    preempted: int = 0
    recomputed: int = 0
    """Tokens computed again after pre-emptions."""


class Core:
    """One vLLM engine, in this process."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, *, slots: int, lora: Lora | None, threads: int, seed: int
    ) -> None:
        self.version = require()
        self.counters = Counters()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(threads)  # without it vLLM computes with one thread
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if config.vllm.tensor_parallel_size == 1:
            bind_to_loopback()
        torch.set_num_threads(threads)
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self._tokens, self._params, self._adapter = tokens_input, SamplingParams, LoRARequest
        self._kind, self._once = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
        self.dtype: str = model.dtype
        given = arguments(model, config, slots=slots, lora=lora, seed=seed)
        if given["enforce_eager"]:
            _disable_compilation()
        try:
            made = EngineArgs(**given)
            vllm_config = made.create_engine_config()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"vLLM refuses its settings: {_first_line(error)}") from error
        self._engine = LLMEngine.from_vllm_config(vllm_config, stat_loggers=[_counting(self.counters)])
        cache = self._engine.vllm_config.cache_config
        self.block_size: int = cache.block_size
        self.kv_tokens: int = cache.num_gpu_blocks * cache.block_size
        self.context: int = self._engine.model_config.max_model_len
        self.vocab: int = self._engine.model_config.get_vocab_size()
        self.transit: Transit | None = None
        """Exchange of KV with the connector; None: KV does not move."""
        if "kv_transfer_config" in given:
            from dora_rl.engine.vllm.connector import TRANSIT

            self.transit = TRANSIT

    # Requests.

    def add(self, name: str, tokens: list[int], most: int, sampling: Sampling, adapter: Any) -> str:
        """Submit a request for at most `most` tokens after these; return its name in vLLM's scheduler."""
        params = self._params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_ids),
            logit_bias=dict(sampling.logit_bias) or None,
            max_tokens=most,
            ignore_eos=True,  # `stop_ids` has all ids that end a response
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=self._kind,
            extra_args=None if self.transit is None else {"kv_transfer_params": {"dora_kv": name}},
        )
        inside: str = self._engine.add_request(name, self._tokens(tokens), params, lora_request=adapter)
        return inside

    def add_probe(self, name: str, tokens: list[int], most: int, adapter: Any) -> None:
        """Submit a request for the log-probs of these tokens and a few more tokens, with one output at its end."""
        params = self._params(
            temperature=1.0,
            max_tokens=most,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0,
            output_kind=self._once,
        )
        self._engine.add_request(name, self._tokens(tokens), params, lora_request=adapter)

    def abort(self, names: list[str]) -> None:
        """Forget these requests."""
        self._engine.abort_request(names)

    def step(self) -> list[Output]:
        """Compute one step of the running batch."""
        return [_output(one) for one in self._engine.step()]

    # Weights.

    def adapter(self, name: str, number: int, folder: str) -> Any:
        """Return the reference to an adapter that requests pass."""
        return self._adapter(lora_name=name, lora_int_id=number, lora_path=folder)

    def add_adapter(self, adapter: Any) -> None:
        """Load an adapter beside the others."""
        if not self._engine.add_lora(adapter):
            raise ValueError(f"vLLM refused the adapter {adapter.lora_name}")

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter."""
        self._engine.remove_lora(number)

    def adapters(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return set(self._engine.list_loras())

    def reload(self, folder: str, label: str) -> None:
        """Serve the weights in this folder; only while nothing runs, since the KV cache is cleared."""
        self._engine.collective_rpc("dora_reload", args=(folder,))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM's cache still has KV of other weights")
        self._engine.set_weight_version(label)

    def differs(self, path: str) -> str:
        """Return the first published tensor that differs, in any bit, from the one inside vLLM; empty: none does."""
        return _first(self._engine.collective_rpc("dora_differs", args=(path,)))

    def adapter_differs(self, path: str, number: int, scale: float) -> str:
        """Return the same for an adapter that is scaled by `scale`."""
        return _first(self._engine.collective_rpc("dora_adapter_differs", args=(path, number, scale)))


def bind_to_loopback() -> None:
    """Let gloo listen on the loopback: an engine of one process forms a group with itself, without the network."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def arguments(model: ModelConfig, config: EngineConfig, *, slots: int, lora: Lora | None, seed: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for our settings."""
    own = config.vllm
    cpu = model.device == "cpu"
    if model.path.endswith(".gguf"):
        raise ConfigError("vLLM reads folders with safetensors: save the GGUF model as one and set model.path to it")
    given: dict[str, Any] = {
        "model": model.path,
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "seed": seed,
        "max_model_len": config.max_context,
        "max_num_seqs": config.max_requests,
        "enforce_eager": cpu if own.enforce_eager is None else own.enforce_eager,
        "tensor_parallel_size": own.tensor_parallel_size,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": False,
    }
    if own.gpu_memory_utilization is None:
        given["kv_cache_memory_bytes"] = config.kv_bytes
    else:
        given["gpu_memory_utilization"] = own.gpu_memory_utilization
    block = own.block_size or (_CPU_BLOCK if cpu else None)
    if block is not None:
        given["block_size"] = block
    if own.move_kv and own.tensor_parallel_size == 1:
        given["kv_transfer_config"] = {
            "kv_connector": "Connector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_both",
        }
    if lora is not None:
        given |= {
            "enable_lora": True,
            "max_loras": slots,
            "max_cpu_loras": slots,
            "max_lora_rank": _room(lora.rank),
            "lora_target_modules": list(lora.targets),  # without it, every module that could be adapted costs time
        }
    ours = sorted(given.keys() & own.arguments.keys())
    if ours:
        raise ConfigError(f"'rollout.engine.vllm.arguments' must leave '{ours[0]}' to other settings")
    return given | dict(own.arguments)


def _first(names: list[str]) -> str:
    return next((name for name in names if name), "")


def _room(rank: int) -> int:
    for room in _RANKS:
        if room >= rank:
            return room
    raise ConfigError(f"'trainer.lora.rank' must be at most {_RANKS[-1]} with vLLM, not {rank}")


def _output(output: Any) -> Output:
    completion = output.outputs[0]
    logprobs = completion.logprobs
    spans: Iterable[Any] = completion.weight_versions or ()
    adapter = completion.lora_request or output.lora_request
    return Output(
        name=output.request_id,
        tokens=list(completion.token_ids),
        logprobs=_sampled(logprobs, completion.token_ids),
        cached=output.num_cached_tokens or 0,
        reason=completion.finish_reason,
        versions=frozenset({adapter.lora_name} if adapter is not None else {span.version for span in spans}),
        prompt=_of_prompt(output.prompt_logprobs, output.prompt_token_ids),
    )


def _of_prompt(logprobs: Any, tokens: Any) -> tuple[float, ...]:
    """Return the log-probs of all tokens of a prompt but the first, if requested."""
    if logprobs is None:
        return ()
    return tuple(one[token].logprob for one, token in zip(logprobs[1:], tokens[1:], strict=True))


def _sampled(logprobs: Any, tokens: Iterable[int]) -> list[float]:
    """Return the log-probs of the sampled tokens, from either of vLLM's two forms."""
    if logprobs is None:
        return []
    if hasattr(logprobs, "logprobs"):
        return list(logprobs.logprobs)
    return [one[token].logprob for one, token in zip(logprobs, tokens, strict=True)]


def _counting(counters: Counters) -> Any:
    """Return a stat logger class of vLLM that updates these counters."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counting(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                counters.running = scheduler_stats.num_running_reqs
                counters.usage = scheduler_stats.kv_cache_usage
                again = scheduler_stats.prefix_cache_stats
                if again is not None:
                    counters.recomputed += again.preempted_queries - again.preempted_hits
            if iteration_stats is not None:
                counters.preempted += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None: ...

    return Counting


def _disable_compilation() -> None:
    """Disable torch.compile: vLLM compiles some of its sampler on the first call even if eager, a minute on a CPU."""
    import torch._dynamo

    torch._dynamo.config.disable = True


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
