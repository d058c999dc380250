"""Chooses the runner that serves a model: the first that computes what `transformers` computes.

Invariant: an engine never serves a model by a runner whose log-probs were not compared with the plain forward pass of
the module. The comparison computes what requests compute: chunks of ragged prompts beside decoding sequences, then one
token at a time, through the paged cache. It takes a few dozen tokens, and is made once per module and runner.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dora_rl.core.errors import ModelError
from dora_rl.engine.kv import KvCache, KvShape
from dora_rl.engine.runner import named
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


class RunnerChoice(NamedTuple):
    """A runner that can compute a model."""

    name: str
    shape: KvShape
    make: Callable[..., Runner]
    """Arguments: the model, the tensors of a version, the cache, the most rows of a pass and the longest context."""


# A choice does not refer to its model, so that the model is freed when nothing else refers to it.
_chosen: weakref.WeakKeyDictionary[Any, dict[tuple[object, ...], RunnerChoice]] = weakref.WeakKeyDictionary()


def choose_runner(model: Any, config: EngineConfig, context: int) -> RunnerChoice:
    """Return the first exact runner; if none is, a `ModelError` names the model and the error of the last one."""
    from dora_rl.engine.cpu_kernels.build import library

    if config.kernels == "native":
        _native(model, config, ())  # an obstacle concerns the setting, not the model
    known = _chosen.setdefault(model, {})
    kernels = None if config.kernels == "torch" else library()
    key = (config.kernels, kernels and kernels._name, config.block_size, model.dtype)
    if key not in known:
        known[key] = _first_exact(model, config, context)
    return known[key]


def _first_exact(model: Any, config: EngineConfig, context: int) -> RunnerChoice:
    failed: list[Exception] = []
    with exactness.failures_as(failed):
        sequences = exactness.probe_sequences(model, context)
        wanted = exactness.reference(model, sequences)
    if failed:
        raise exactness.refusal(model, "rollout", "a plain forward pass", failed[0])
    last: ExactnessDifference | Exception = ModelError("no runner can compute it")
    for find in (_native,) if config.kernels == "native" else (_native, _generic, _padded, _aligned):
        with exactness.failures_as(failed):
            choice = find(model, config, sequences[0])
            last = measure(model, choice, sequences, wanted)
            if last.exact:
                return choice
        if failed:
            last = failed.pop()
    raise exactness.refusal(model, "rollout", HOW, last)


def _native(model: Any, config: EngineConfig, _: Sequence[int]) -> RunnerChoice:
    from dora_rl.engine.cpu_kernels.build import build
    from dora_rl.engine.cpu_kernels.runner import CpuKernelRunner, obstacle

    library, missing = build() if config.kernels != "torch" else (None, "kernels are set to torch")
    why_not = obstacle(model, library) if library is not None else missing
    if why_not:
        raise ModelError(f"kernels are set to native, but: {why_not}; set kernels to auto")

    def make(model: Any, tensors: Any, cache: KvCache, limit: int, context: int) -> Runner:
        return CpuKernelRunner(model, named(model, tensors), cache, limit, context)

    return RunnerChoice("native", KvShape.of(model, config.block_size), make)


def _generic(model: Any, config: EngineConfig, _: Sequence[int]) -> RunnerChoice:
    from dora_rl.engine.torch_runner import TorchRunner

    use_kernels = config.kernels != "torch"

    def make(model: Any, tensors: Any, cache: KvCache, _limit: int, context: int) -> Runner:
        return TorchRunner(model, tensors, cache, context, use_kernels)

    return RunnerChoice("generic", KvShape.of(model, config.block_size), make)


def _padded(model: Any, config: EngineConfig, tokens: Sequence[int]) -> RunnerChoice:
    return _dense(model, config, tokens, aligned=False)


def _aligned(model: Any, config: EngineConfig, tokens: Sequence[int]) -> RunnerChoice:
    return _dense(model, config, tokens, aligned=True)


def _dense(model: Any, config: EngineConfig, tokens: Sequence[int], *, aligned: bool) -> RunnerChoice:
    from dora_rl.engine.padded_runner import DenseLayout, PaddedRunner

    layout = DenseLayout.of(model, list(tokens[:3]))

    def make(model: Any, tensors: Any, cache: KvCache, _limit: int, _context: int) -> Runner:
        return PaddedRunner(model, tensors, cache, layout, aligned=aligned)

    return RunnerChoice("aligned" if aligned else "padded", layout.shape(model, config.block_size), make)


def measure(
    model: Any, choice: RunnerChoice, sequences: Sequence[Sequence[int]], wanted: Sequence[torch.Tensor]
) -> ExactnessDifference:
    """Compare a runner's log-probs of these sequences with the wanted ones."""
    found = logprobs(model, choice, sequences)
    ours = [torch.stack(list(rows.values())) for rows in found]
    plain = [rows[list(at)] for rows, at in zip(wanted, found, strict=True)]
    return exactness.difference(ours, plain, model)


def logprobs(model: Any, choice: RunnerChoice, sequences: Sequence[Sequence[int]]) -> list[dict[int, torch.Tensor]]:
    """Return, for each sequence, the log-probs after the last token of its prompt and after all later tokens."""
    blocks = choice.shape.blocks(max(map(len, sequences)))
    cache = KvCache(choice.shape, choice.shape.block_bytes * blocks * len(sequences), model.device)
    limit = sum(map(len, sequences))
    rows = TokenRows(limit, len(sequences), blocks)
    # The blocks of the sequences are interleaved.
    for index in range(len(sequences)):
        rows.table[index] = [index + len(sequences) * block for block in range(blocks)]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    runner = choice.make(model, tensors, cache, limit, max(map(len, sequences)))
    found: list[dict[int, torch.Tensor]] = [{} for _ in sequences]
    done = [0] * len(sequences)
    for chunks in _passes([len(sequence) for sequence in sequences]):
        last = _fill_rows(rows, chunks, done, sequences)
        logits = runner.forward(rows, torch.get_num_threads(), False)
        for row, (index, at) in enumerate(last):
            found[index][at] = logits[row].float().log_softmax(-1)
    return found


def _passes(lengths: list[int]) -> list[list[tuple[int, int]]]:
    """Return the (sequence, new tokens) of each forward pass; decoding sequences come first, as in the engine."""
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


def _fill_rows(
    rows: TokenRows, chunks: list[tuple[int, int]], done: list[int], sequences: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Fill the buffers and advance `done`; return the (sequence, position) of the rows that get logits."""
    count = 0
    last: list[tuple[int, int]] = []
    for index, size in chunks:
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
