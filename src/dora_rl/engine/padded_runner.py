"""Runs a causal LM with its own attention, through a dense cache of keys and values, as `generate` does.

Modules that do not call the attention interface, or whose keys and values have unusual dimensions (latent attention,
attention sinks), are run through the cache interface of `transformers` instead. Keys and values stay in the paged
cache; for each forward pass those of some sequences are gathered into a dense cache, padded on the left and masked, and
what the module adds is written back.

Invariants:
- new tokens are never padded: decoding sequences go through the module together, a chunk of a prompt goes alone.
  Modules that do not accept positions get only sequences of equal length (`aligned`), and no padding;
- padding is zero and masked: memory that was never written, or that belongs to another request, is not read.

Gathering costs as much memory traffic as the attention itself, so `torch_runner` is preferred where it is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from dora_rl.core.errors import ModelError
from dora_rl.engine.kv import KvShape
from dora_rl.engine.runner import named
from dora_rl.engine.torch_runner import GATHERED_ROWS, is_router, with_weights
from dora_rl.models.exactness import accepts, shared_copy

if TYPE_CHECKING:
    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.kv import KvCache
    from dora_rl.engine.token_rows import TokenRows


class LayerShape(NamedTuple):
    """Dimensions of the keys and values of one token in one layer."""

    heads: int
    key: int
    value: int


class DenseLayout(NamedTuple):
    """What a module keeps in its cache. A layer that uses the keys and values of another keeps nothing."""

    layers: tuple[LayerShape | None, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, tokens: list[int]) -> DenseLayout:
        """Return the layout that a forward pass over a few tokens shows."""
        module = shared_copy(model)
        module.eval()
        cache = DynamicCache()
        result = module(input_ids=torch.tensor([tokens], device=model.device), use_cache=True, past_key_values=cache)
        found = getattr(result, "past_key_values", None)
        if found is not cache or not cache.layers:
            raise ModelError("it does not keep its keys and values in a cache of transformers")
        layers: list[LayerShape | None] = []
        for layer in cache.layers:
            if not layer.is_initialized:
                layers.append(None)
                continue
            keys, values = layer.keys, layer.values
            plain = keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3] == (
                1,
                keys.shape[1],
                len(tokens),
            )
            if not plain:
                raise ModelError("its cache holds other things than the keys and values of each token")
            layers.append(LayerShape(keys.shape[1], keys.shape[3], values.shape[3]))
        return cls(tuple(layers))

    def shape(self, model: Any, block_size: int) -> KvShape:
        """Return the shape of blocks that fit the largest layer."""
        used = [layer for layer in self.layers if layer is not None]
        heads, width = max(layer.heads for layer in used), max(max(layer.key, layer.value) for layer in used)
        return KvShape(len(self.layers), heads, width, block_size, str(model.dtype).removeprefix("torch."))


class PaddedRunner:
    """The weights of one version in a copy of the module, which shares parameters with the source of the weights."""

    stretches = False
    small = False

    def __init__(
        self, model: Any, tensors: Mapping[str, Any], cache: KvCache, layout: DenseLayout, *, aligned: bool = False
    ) -> None:
        self._module = with_weights(model, named(model, tensors))
        self._cache = cache
        self._layout = layout
        self._device = model.device
        self._aligned = aligned
        self._takes_positions = not aligned and accepts(model, "position_ids")
        self._can_keep = accepts(model, "logits_to_keep")
        self._record = False
        self._routed: dict[int, torch.Tensor] = {}
        self._experts = np.zeros((0, 0, 0), dtype=np.int16)
        self._routers = [module for module in self._module.modules() if is_router(module)]
        for index, router in enumerate(self._routers):
            router.register_forward_hook(self._recorder(index))

    @torch.no_grad()
    def forward(self, rows: TokenRows, threads: int, record_experts: bool) -> torch.Tensor:  # noqa: ARG002
        """Run the module over the rows, a few sequences at a time."""
        self._record = record_experts and bool(self._routers)
        wanted = rows.logit_row[: rows.logit_count]
        logits: torch.Tensor | None = None
        for starts, length in _calls(rows, aligned=self._aligned):
            at = starts[:, None] + np.arange(length)
            # Usually only the last token of a chunk has logits, if any.
            few = self._can_keep and not np.isin(at[:, :-1], wanted).any()
            found = self._call(rows, at, {"logits_to_keep": 1} if few else {}).flatten(0, 1).float()
            if logits is None:
                logits = torch.empty((rows.logit_count, found.shape[-1]), device=self._device)
            computed = (at[:, -1:] if few else at).ravel()
            order = np.argsort(computed)
            places = np.flatnonzero(np.isin(wanted, computed))
            logits[self._to(places)] = found[self._to(order[np.searchsorted(computed[order], wanted[places])])]
        assert logits is not None
        return logits

    def decode(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int, threads: int) -> int:
        raise NotImplementedError("the module is called once per step")

    def experts(self) -> npt.NDArray[np.int16]:
        """Return the experts of the last recorded pass."""
        return self._experts

    @contextlib.contextmanager
    def computing_in(self, cache: KvCache) -> Iterator[None]:
        """Let keys and values go to another cache meanwhile."""
        usual, self._cache = self._cache, cache
        try:
            yield
        finally:
            self._cache = usual

    def _call(self, rows: TokenRows, at: npt.NDArray[np.int64], keep: dict[str, Any]) -> torch.Tensor:
        """Run one forward pass over the rows [sequences, new tokens]; return [sequences, new tokens or 1, vocab]."""
        starts, length = at[:, 0], at.shape[1]
        past = rows.position[starts].astype(np.int64)
        longest = int(past.max())
        # Column j of the dense cache holds the token at position j - padding.
        positions = np.arange(longest + length)[None] - (longest - past)[:, None]
        size = self._cache.shape.block_size
        real = np.maximum(positions, 0)
        table = rows.table[rows.sequence[starts][:, None], real // size].astype(np.int64)
        block, offset, mask = (self._to(array) for array in (table, real % size, positions >= 0))
        cache = self._gather(block[:, :longest], offset[:, :longest], ~mask[:, :longest]) if longest else DynamicCache()
        given: dict[str, Any] = {"position_ids": self._to(positions[:, longest:])} if self._takes_positions else {}
        self._routed.clear()
        result = self._module(
            input_ids=self._to(rows.token[at]),
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            **given,
            **keep,
        )
        self._write_back(cache, block[:, longest:], offset[:, longest:])
        if self._record:
            self._keep_experts(rows.count, at.ravel())
        logits: torch.Tensor = result.logits
        return logits

    def _gather(self, block: torch.Tensor, offset: torch.Tensor, hidden: torch.Tensor) -> DynamicCache:
        cache = DynamicCache()
        for index, layer in enumerate(self._layout.layers):
            if layer is None:
                continue
            keys, values = (
                self._cache.data[block, index, part, offset, : layer.heads, :width]
                .masked_fill(hidden[:, :, None, None], 0.0)
                .transpose(1, 2)
                for part, width in ((0, layer.key), (1, layer.value))
            )
            cache.update(keys, values, index)
        return cache

    def _write_back(self, cache: DynamicCache, block: torch.Tensor, offset: torch.Tensor) -> None:
        """Copy the keys and values that the module added into the paged cache."""
        new = block.shape[1]
        held: Any  # annotated as a layer of any kind; `DenseLayout` has checked that it has keys and values
        for index, (layer, held) in enumerate(zip(self._layout.layers, cache.layers, strict=True)):
            if layer is None:
                continue
            data = self._cache.data
            data[block, index, 0, offset, : layer.heads, : layer.key] = held.keys[:, :, -new:].transpose(1, 2)
            data[block, index, 1, offset, : layer.heads, : layer.value] = held.values[:, :, -new:].transpose(1, 2)

    def _keep_experts(self, count: int, at: npt.NDArray[np.int64]) -> None:
        found = [self._routed[index].cpu().numpy().astype(np.int16) for index in range(len(self._routers))]
        layers = np.stack(found, axis=1)
        if self._experts.shape != (count, *layers.shape[1:]):
            self._experts = np.zeros((count, *layers.shape[1:]), dtype=np.int16)
        self._experts[at] = layers

    def _recorder(self, index: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if self._record:
                self._routed[index] = output[-1]

        return hook

    def _to(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _calls(rows: TokenRows, *, aligned: bool) -> list[tuple[npt.NDArray[np.int64], int]]:
    """Return the calls as (first rows, new tokens of each): sequences with one new token by similar length, or by equal
    length if `aligned`; the others one by one."""
    sequence = rows.sequence[: rows.count]
    starts = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    lengths = np.diff(np.r_[starts, rows.count])
    calls = [(starts[at : at + 1], int(lengths[at])) for at in np.flatnonzero(lengths > 1)]
    single = starts[lengths == 1]
    single = single[np.argsort(rows.position[single], kind="stable")]
    start = 0
    while start < len(single):
        shortest = int(rows.position[single[start]])
        longest = shortest if aligned else 2 * shortest + 32
        end = start + 1
        while end < len(single) and end - start < GATHERED_ROWS and rows.position[single[end]] <= longest:
            end += 1
        calls.append((single[start:end], 1))
        start = end
    return calls
