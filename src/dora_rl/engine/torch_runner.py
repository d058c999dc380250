"""Runs any causal LM of `transformers` that calls the attention interface: its own module, with paged attention.

The rows go through the module as one flat sequence with explicit positions. The attention function, registered in the
library's attention interface, writes their keys and values into the paged cache, and each row attends over its own
sequence. The function gets its inputs as a keyword argument through the module's forward pass, so there is no hidden
state. On a CPU in float32 the compiled attention computes this without padding; elsewhere torch does, on rows sorted by
length, so that padding stays small.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes as c
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface

from dora_rl.core.errors import ModelError
from dora_rl.engine.cpu_kernels import binding
from dora_rl.engine.cpu_kernels.build import library as compiled
from dora_rl.engine.cpu_kernels.runner import HEAD_VECTORS
from dora_rl.engine.runner import named
from dora_rl.models.exactness import set_attention

if TYPE_CHECKING:
    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.kv import KvCache
    from dora_rl.engine.token_rows import TokenRows

ATTENTION = "dora_rl_paged"
GATHERED_ROWS = 64  # rows whose keys are gathered at once; bounds the memory of the torch path


class TorchRunner:
    """The weights of one version in a copy of the module, which shares parameters with the source of the weights."""

    stretches = False
    small = False

    def __init__(
        self, model: Any, tensors: Mapping[str, Any], cache: KvCache, context: int, use_kernels: bool = True
    ) -> None:
        self._module = with_weights(model, named(model, tensors))
        set_attention(self._module, ATTENTION)
        self._context, self._use_kernels = context, use_kernels
        self._paged = _Paged(cache, context, use_kernels)
        self._device = model.device
        self._routed: dict[int, torch.Tensor] = {}
        self._record = False
        self._routers = [module for name, module in self._module.named_modules() if is_router(module)]
        for index, router in enumerate(self._routers):
            router.register_forward_hook(self._recorder(index))

    @torch.no_grad()
    def forward(self, rows: TokenRows, threads: int, record_experts: bool) -> torch.Tensor:
        """Run the module over the rows as one flat sequence."""
        self._record = record_experts
        self._paged.begin(rows, threads, self._device)
        count = rows.count
        result = self._module(
            input_ids=torch.from_numpy(rows.token[:count]).to(self._device)[None],
            position_ids=torch.from_numpy(rows.position[:count]).to(self._device, torch.long)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(rows.logit_row[: rows.logit_count]).to(self._device, torch.long),
            paged=self._paged,
        )
        logits: torch.Tensor = result.logits[0].float()
        return logits

    def decode(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int, threads: int) -> int:
        raise NotImplementedError("the module is called once per step")

    def experts(self) -> npt.NDArray[np.int16]:
        """Return the experts of the last recorded pass."""
        if not self._routed:
            return np.zeros((0, 0, 0), dtype=np.int16)
        layers = [self._routed[index].cpu().numpy().astype(np.int16) for index in range(len(self._routers))]
        return np.stack(layers, axis=1)

    @contextlib.contextmanager
    def computing_in(self, cache: KvCache) -> Iterator[None]:
        """Let attention use another cache meanwhile."""
        usual, self._paged = self._paged, _Paged(cache, self._context, self._use_kernels)
        try:
            yield
        finally:
            self._paged = usual

    def _recorder(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if self._record:
                self._routed[index] = output[-1]

        return hook


class _Paged:
    """The inputs of attention in the current forward pass."""

    def __init__(self, cache: KvCache, context: int, use_kernels: bool) -> None:
        self._cache = cache
        self._context = context
        self._library = compiled() if use_kernels and _suits_kernels(cache) else None
        if self._library is not None:
            self._native = binding.Cache.of(cache)
        self._scores = torch.empty(0)

    def begin(self, rows: TokenRows, threads: int, device: torch.device) -> None:
        """Set the rows of a forward pass."""
        count, size = rows.count, self._cache.shape.block_size
        position, sequence = rows.position[:count].astype(np.int64), rows.sequence[:count]
        self._rows, self._threads = rows, threads
        self._block = torch.from_numpy(rows.table[sequence, position // size].astype(np.int64)).to(device)
        self._offset = torch.from_numpy(position % size).to(device)
        if self._library is None:
            self._buckets = _buckets(rows, size, device)

    def attend(self, layer: int, q: Any, k: Any, v: Any, scale: float, window: int, cap: float) -> Any:
        """Write k and v [rows, kv heads, dim], then attend with q [rows, heads, dim]; return [rows, heads, dim]."""
        data = self._cache.data
        data[self._block, layer, 0, self._offset] = k
        data[self._block, layer, 1, self._offset] = v
        if self._library is None:
            return self._attend_torch(layer, q, scale, window, cap)
        heads, threads = q.shape[1], self._threads
        needed = threads * (heads // k.shape[1]) * (self._context + 64)
        if len(self._scores) < needed:
            self._scores = torch.empty(needed)
        q = q.contiguous()
        out = torch.empty_like(q)
        rows = binding.Rows(
            count=self._rows.count,
            table_stride=self._rows.table.shape[1],
            position=self._rows.position.ctypes.data,
            sequence=self._rows.sequence.ctypes.data,
            table=self._rows.table.ctypes.data,
        )
        pointers = (q.data_ptr(), self._scores.data_ptr(), self._context, out.data_ptr(), threads)
        self._library.paged_attention(c.byref(self._native), c.byref(rows), layer, heads, window, scale, cap, *pointers)
        return out

    def _attend_torch(self, layer: int, q: Any, scale: float, window: int, cap: float) -> Any:
        out = torch.empty_like(q)
        groups = q.shape[1] // self._cache.shape.kv_heads
        for rows, table, position in self._buckets:
            blocks = self._cache.data[table, layer]  # [n, blocks, 2, size, kv heads, dim]
            reach = torch.arange(table.shape[1] * blocks.shape[3], device=q.device)[None]
            seen = reach <= position[:, None]
            if window:
                seen &= reach > position[:, None] - window
            # Memory beyond a row's length was never written or belongs to another request: not even NaN may leak.
            hidden = ~seen[:, None, :, None]
            keys, values = (
                blocks[:, :, index].flatten(1, 2).transpose(1, 2).masked_fill(hidden, 0.0) for index in (0, 1)
            )
            out[rows] = _plain(q[rows], keys, values, seen, groups, scale, cap)
        return out


def _plain(q: Any, keys: Any, values: Any, seen: Any, groups: int, scale: float, cap: float) -> Any:
    """q [n, heads, dim], keys and values [n, kv heads, tokens, dim], seen [n, tokens]."""
    mask = seen[:, None, None]
    if not cap:
        return functional.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=scale, enable_gqa=groups > 1
        )[:, :, 0]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.tanh(q[:, :, None] @ keys.transpose(2, 3) * scale / cap) * cap
    weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(q.dtype)
    return (weights @ values)[:, :, 0]


def _buckets(rows: TokenRows, block_size: int, device: torch.device) -> list[tuple[Any, Any, Any]]:
    """Group rows by similar length, few enough that gathering their keys stays small: (rows, tables, positions)."""
    position = rows.position[: rows.count]
    order = np.argsort(position, kind="stable")
    buckets = []
    start = 0
    while start < len(order):
        longest = 2 * int(position[order[start]]) + 32
        end = start + 1
        while end < len(order) and end - start < GATHERED_ROWS and position[order[end]] <= longest:
            end += 1
        some = order[start:end]
        blocks = int(position[some[-1]]) // block_size + 1
        table = rows.table[rows.sequence[some], :blocks].astype(np.int64)
        to = [torch.from_numpy(array).to(device) for array in (some, table, position[some].astype(np.int64))]
        buckets.append((to[0], to[1], to[2]))
        start = end
    return buckets


def _suits_kernels(cache: KvCache) -> bool:
    library = compiled()
    if library is None or cache.data.device.type != "cpu" or cache.data.dtype != torch.float32:
        return False
    width = library.vector_width()
    head_dim = cache.shape.head_dim
    return head_dim % width == 0 and head_dim // width in HEAD_VECTORS


def is_router(module: Any) -> bool:
    return type(module).__name__.endswith("TopKRouter")


def with_weights(model: Any, weights: Mapping[str, Any]) -> Any:
    """Return a copy of the module whose parameters are these tensors; no weight is copied."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    module = copy.deepcopy(model, shared)
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        parameter = torch.nn.Parameter(tensor.to(model.device, model.dtype), requires_grad=False)
        module.get_submodule(owner)._parameters[leaf] = parameter
    module.eval()
    return module


def _attention(
    module: Any, query: Any, key: Any, value: Any, _mask: Any, scaling: float | None = None, **given: Any
) -> tuple[Any, None]:
    """The attention function that the module calls: [1, heads, rows, dim] in, [1, rows, heads, dim] out."""
    unknown = [name for name in ("s_aux", "position_bias") if given.get(name) is not None]
    if unknown:
        raise ModelError(f"the built-in engine does not support attention with {unknown[0]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    window, cap = given.get("sliding_window") or 0, given.get("softcap") or 0.0
    return given["paged"].attend(module.layer_idx, q, k, v, scale, window, cap)[None], None


AttentionInterface.register(ATTENTION, _attention)
