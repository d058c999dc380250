"""Which runner serves a model: the first that computes what `transformers` computes.

Invariant: an engine never serves a model by a runner whose log-probs were not compared with the plain forward pass of
the module. The comparison goes the way that requests go: chunks of ragged prompts beside decoding sequences, then token
by token, through the paged cache. It takes a few dozen tokens, and is made once for a module and a way to compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dora_rl.core.errors import ModelError
from dora_rl.engine.kv import KvCache, KvShape
from dora_rl.engine.token_rows import TokenRows
from dora_rl.models import exactness
from dora_rl.models.exactness import ExactnessDifference

if TYPE_CHECKING:
    from dora_rl.engine.config import EngineConfig
    from dora_rl.engine.runner import Runner

HOW = "prefill in chunks and decoding in a ragged batch"
_PREFILLED = (13, 3, 8)
"""Tokens of each compared sequence that are prefilled; the others are decoded."""
_CHUNK = 9
"""The first sequence is prefilled in two chunks."""


class Way(NamedTuple):
    """A way to compute a model."""

    name: str
    shape: KvShape
    make: Callable[..., Runner]
    """From the model, the tensors of a version, the cache, the most rows of a pass and the longest context."""


# Ways do not refer to their model, so that it is let go of when nobody else needs it.
_chosen: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], Way]] = weakref.WeakKeyDictionary()


def choose(model: Any, config: EngineConfig, context: int) -> Way:
    """The first way that is exact; else a `ModelError` names the model and what was wrong with the last one tried."""
    from dora_rl.engine.cpu_kernels.build import library

    if config.kernels == "native":
        _native(model, config, ())  # what stands against it is a matter of the setting, not of the model
    known = _chosen.setdefault(model, {})
    kernels = None if config.kernels == "torch" else library()
    key = (config.kernels, kernels and kernels._name, config.block_size, model.dtype)
    if key not in known:
        known[key] = _first_exact(model, config, context)
    return known[key]


def _first_exact(model: Any, config: EngineConfig, context: int) -> Way:
    failed: list[Exception] = []
    with exactness.failures_as(failed):
        sequences = exactness.probe_sequences(model, context)
        wanted = exactness.reference(model, sequences)
    if failed:
        raise exactness.refusal(model, "rollout", "a plain forward pass", failed[0])
    last: ExactnessDifference | Exception = ModelError("there is no way to compute it")
    for find in (_native,) if config.kernels == "native" else (_native, _generic, _padded, _aligned):
        with exactness.failures_as(failed):
            way = find(model, config, sequences[0])
            last = measure(model, way, sequences, wanted)
            if last.exact:
                return way
        if failed:
            last = failed.pop()
    raise exactness.refusal(model, "rollout", HOW, last)


def _native(model: Any, config: EngineConfig, _: Sequence[int]) -> Way:
    from dora_rl.engine.cpu_kernels.build import build
    from dora_rl.engine.cpu_kernels.runner import CpuKernelRunner, obstacle

    library, missing = build() if config.kernels != "torch" else (None, "kernels are set to torch")
    why_not = obstacle(model, library) if library is not None else missing
    if why_not:
        raise ModelError(f"kernels are set to native, but: {why_not}; set kernels to auto")
    return Way("native", KvShape.of(model, config.block_size), CpuKernelRunner)


def _generic(model: Any, config: EngineConfig, _: Sequence[int]) -> Way:
    from dora_rl.engine.torch_runner import TorchRunner

    use_kernels = config.kernels != "torch"

    def make(model: Any, tensors: Any, cache: KvCache, _limit: int, context: int) -> Runner:
        return TorchRunner(model, tensors, cache, context, use_kernels)

    return Way("generic", KvShape.of(model, config.block_size), make)


def _padded(model: Any, config: EngineConfig, tokens: Sequence[int]) -> Way:
    return _dense(model, config, tokens, aligned=False)


def _aligned(model: Any, config: EngineConfig, tokens: Sequence[int]) -> Way:
    return _dense(model, config, tokens, aligned=True)


def _dense(model: Any, config: EngineConfig, tokens: Sequence[int], *, aligned: bool) -> Way:
    from dora_rl.engine.padded_runner import DenseLayout, PaddedRunner

    layout = DenseLayout.of(model, list(tokens[:3]))

    def make(model: Any, tensors: Any, cache: KvCache, _limit: int, _context: int) -> Runner:
        return PaddedRunner(model, tensors, cache, layout, aligned=aligned)

    return Way("aligned" if aligned else "padded", layout.shape(model, config.block_size), make)


def measure(
    model: Any, way: Way, sequences: Sequence[Sequence[int]], wanted: Sequence[torch.Tensor]
) -> ExactnessDifference:
    """How far a runner's log-probs of these sequences are from the wanted ones."""
    found = logprobs(model, way, sequences)
    ours = [torch.stack(list(rows.values())) for rows in found]
    plain = [rows[list(at)] for rows, at in zip(wanted, found, strict=True)]
    return exactness.difference(ours, plain, model)


def logprobs(model: Any, way: Way, sequences: Sequence[Sequence[int]]) -> list[dict[int, torch.Tensor]]:
    """For each sequence, the log-probs after the tokens at some positions: the end of its prompt and all behind it."""
    blocks = way.shape.blocks(max(map(len, sequences)))
    cache = KvCache(way.shape, way.shape.block_bytes * blocks * len(sequences), model.device)
    limit = sum(map(len, sequences))
    rows = TokenRows(limit, len(sequences), blocks)
    # Blocks of different sequences lie between each other.
    for index in range(len(sequences)):
        rows.table[index] = [index + len(sequences) * block for block in range(blocks)]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    runner = way.make(model, tensors, cache, limit, max(map(len, sequences)))
    found: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
    done = [0] * len(sequences)
    for parts in _passes([len(sequence) for sequence in sequences]):
        last = _lay_rows(rows, parts, done, sequences)
        logits = runner.forward(rows, torch.get_num_threads(), False)
        for place, (index, at) in enumerate(last):
            found[index][at] = logits[place].float().log_softmax(-1)
    return found


def _passes(lengths: list[int]) -> list[list[tuple[int, int]]]:
    """The (sequence, new tokens) of each forward pass; decoding sequences first, as in the engine."""
    prefilled = [min(some, length) for some, length in zip(_PREFILLED, lengths, strict=True)]
    chunk = min(_CHUNK, prefilled[0])
    left = [length - some for length, some in zip(lengths, prefilled, strict=True)]
    passes = [[(0, chunk), (1, prefilled[1])]]
    second = [(1, 1)] if left[1] else []
    left[1] -= len(second)
    second += [(0, prefilled[0] - chunk)] if prefilled[0] > chunk else []
    passes.append([*second, (2, prefilled[2])])
    while any(left):
        passes.append([(index, 1) for index, more in enumerate(left) if more])
        left = [max(0, more - 1) for more in left]
    return passes


def _lay_rows(
    rows: TokenRows, parts: list[tuple[int, int]], done: list[int], sequences: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Fill the buffers and count the tokens as done; the (sequence, position) of the rows that get logits."""
    count = 0
    last: list[tuple[int, int]] = []
    for index, size in parts:
        start, end = done[index], done[index] + size
        rows.token[count : count + size] = sequences[index][start:end]
        rows.position[count : count + size] = range(start, end)
        rows.sequence[count : count + size] = index
        count += size
        rows.logit_row[len(last)] = count - 1
        last.append((index, end - 1))
        done[index] = end
    rows.count, rows.logit_count = count, len(last)
    return last
