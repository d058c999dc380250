"""Small random models, and helpers that run an engine to its end."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dora_rl.core.tokens import TokenChunk
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.requests import Finished, Request, Sampling, StepOutput
from dora_rl.models.sources import MemoryWeights

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "olmoe", "qwen3_moe", "gemma2"]
VOCAB = 96


@functools.cache
def model(family: Family, seed: int = 0) -> Any:
    """A model whose next-token distributions are neither flat nor certain."""
    import transformers

    t: Any = transformers  # the types of its configs do not match their calls

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    few = {"num_experts": 8, "num_experts_per_tok": 2}
    kinds: dict[str, Any] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**sizes)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
        ),
        "olmoe": lambda: t.OlmoeForCausalLM(t.OlmoeConfig(**sizes, **few)),
        "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**sizes, **few, moe_intermediate_size=32)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, sliding_window=16)),
    }
    torch.manual_seed(seed)
    made = kinds[family]()
    made.eval()
    return made


def prompts(count: int, seed: int = 0, longest: int = 50) -> list[tuple[int, ...]]:
    """Ragged prompts; every fifth repeats the one before, as siblings do."""
    random = np.random.default_rng(seed)
    made: list[tuple[int, ...]] = []
    for index in range(count):
        if index % 5 == 4:
            made.append(made[-1])
        else:
            made.append(tuple(random.integers(3, VOCAB, random.integers(1, longest)).tolist()))
    return made


def requests(count: int, *, seed: int = 0, first: int = 0, **sampling: Any) -> list[Request]:
    """Requests of version 0 with ragged prompts and ragged lengths."""
    longest = sampling.pop("max_tokens", 24)
    return [
        Request(
            trajectory=first + index,
            version=0,
            prompt=prompt,
            sampling=Sampling(max_tokens=1 + (7 * index) % longest, seed=11, **sampling),
        )
        for index, prompt in enumerate(prompts(count, seed))
    ]


def engine(made: Any, *, weights: Any = None, versions: Iterable[int] = (0,), name: str = "a", **config: Any) -> Engine:
    """An engine that serves these versions in its first slots."""
    versions = list(versions)
    settings: dict[str, Any] = {"kv_bytes": 1 << 22, "prefill_chunk": 16, "stream_every": 4, "stretch": 1, "threads": 1}
    settings |= {"slots": len(versions)} | config
    built = Engine(made, weights or MemoryWeights.of(made), EngineConfig(**settings), instance=name)
    for slot, version in enumerate(versions):
        built.load(slot, version)
    built.wait_for_loads()
    return built


def kv_bytes(made: Any, blocks: int, block_size: int = 16) -> int:
    """Return the cap that fits exactly this many blocks."""
    from dora_rl.engine.kv import KvShape

    return KvShape.of(made, block_size).block_bytes * blocks


class Response(NamedTuple):
    """Tokens and log-probs of one response."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    model_logprobs: tuple[float, ...]

    def joined(self, chunk: TokenChunk) -> Response:
        """These tokens and those of a chunk."""
        return Response(
            self.tokens + tuple(chunk.tokens.tolist()),
            self.logprobs + tuple(chunk.logprobs.tolist()),
            self.model_logprobs + tuple(chunk.model_logprobs.tolist()),
        )


class Collector:
    """Collects the reports of one or more engines."""

    def __init__(self) -> None:
        self.responses: dict[int, Response] = {}
        self.finished: dict[int, Finished] = {}
        self.experts: dict[int, list[Any]] = {}
        self.prompt_experts: dict[int, Any] = {}
        self.events: list[Any] = []

    def collect(self, output: StepOutput) -> None:
        for chunk in output.chunks:
            before = self.responses.get(chunk.trajectory, Response((), (), ()))
            assert chunk.start == len(before.tokens), "tokens were reported twice or out of order"
            self.responses[chunk.trajectory] = before.joined(chunk)
            if chunk.prompt_experts is not None:
                assert chunk.start == 0
                self.prompt_experts[chunk.trajectory] = chunk.prompt_experts
            if chunk.experts is not None:
                self.experts.setdefault(chunk.trajectory, []).append(chunk.experts)
        for one in output.finished:
            assert one.trajectory not in self.finished
            assert one.tokens == len(self.responses[one.trajectory].tokens)
            self.finished[one.trajectory] = one
        self.events.extend(output.events)

    def run(self, *engines: Engine) -> Collector:
        """Step until nothing is left to do; check the engine after every step."""
        while any(one.busy for one in engines):
            for one in engines:
                self.collect(one.step())
                one.check()
        return self


def run(built: Engine, some: Iterable[Request]) -> Collector:
    """Submit requests and run the engine to the end."""
    for request in some:
        built.submit(request)
    return Collector().run(built)


@functools.cache
def greedy_reference(family: Family, count: int, tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return what `generate` answers to the prompts, as one left-padded batch."""
    made, given = model(family), prompts(count, seed)
    width = max(map(len, given))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in given])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in given])
    config = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        out = made.generate(input_ids=ids, attention_mask=mask, **config)
    return [tuple(row) for row in out[:, width:].tolist()]
