"""An extension of vLLM's workers: it loads weights, and reads back the tensors that vLLM computes with.

vLLM fuses tensors (queries, keys and values are one matrix), pads vocabularies and scales adapters, and on a CPU it
packs matrices for its kernels and drops the originals. So each published tensor is compared with what became of it:

- a packed matrix is read back through the kernel that computes with it: its product with the identity is the matrix
  itself, and in float32 every product and sum in it is exact;
- the half of an adapter that vLLM scales is compared with the published half times the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

_ADAPTER = "base_model.model."
_ROWS = 256
"""Rows of the identity in one product."""


class Worker:
    """Methods that vLLM adds to its worker and calls by name."""

    model_runner: Any
    reload_weights: Any

    @torch.no_grad()
    def dora_reload(self, folder: str) -> None:
        """Serve the weights in a folder."""
        self.reload_weights(weights_path=folder)
        model = self.model_runner.get_model()
        head: Any = getattr(model, "lm_head", None)
        if hasattr(head, "cpu_linear") and head.weight is _embeddings(model):
            # A head that is tied to the embeddings has no weights to load, so vLLM does not pack it again.
            head.quant_method.process_weights_after_loading(head)

    @torch.no_grad()
    def dora_differs(self, path: str) -> str:
        """Return the first tensor of a published file that differs from the served one; empty: none does."""
        return weights_differ(self.model_runner.get_model(), load_file(path, device="cpu"))

    @torch.no_grad()
    def dora_adapter_differs(self, path: str, number: int, scale: float) -> str:
        """Return the same for the adapter of this number."""
        loaded = self.model_runner.lora_manager._adapter_manager.lora_index_to_id
        published = load_file(path, device="cpu")
        if number not in loaded:
            return next(iter(published))
        return adapter_differs(self.model_runner.get_model(), published, loaded.index(number), scale)


def weights_differ(model: Any, published: dict[str, Tensor]) -> str:
    """Return the first tensor that differs from the model's; empty: none does."""
    modules = dict(model.named_modules())
    packed = _packed(model)
    for name, tensor in published.items():
        owner, _, kind = name.rpartition(".")
        homes = [home for home in _homes(owner, packed) if home.module in modules]
        if owner.endswith("embed_tokens") and "lm_head.weight" not in published and "lm_head" in modules:
            homes.append(_Home("lm_head"))  # tied weights are published once and used twice
        if not homes or not all(_is(_served(modules[home.module], kind, home, tensor), tensor) for home in homes):
            return name
    return ""


def adapter_differs(model: Any, published: dict[str, Tensor], index: int, scale: float) -> str:
    """Return the first tensor that differs from the adapter at this index; empty: none does."""
    layers = {name: one for name, one in model.named_modules() if hasattr(one, "lora_a_stacked")}
    packed = _packed(model)
    for name, tensor in published.items():
        if not _adapts(layers, packed, name, tensor, index, scale):
            return name
    return ""


class _Home(NamedTuple):
    """Where vLLM may keep the tensors of a module: in a module of the same name, or in a part of a fused one."""

    module: str
    part: int = 0


def _homes(owner: str, packed: dict[str, list[str]]) -> Iterator[_Home]:
    yield _Home(owner)
    above, _, leaf = owner.rpartition(".")
    for fused, leaves in packed.items():
        if leaf in leaves:
            yield _Home(f"{above}.{fused}" if above else fused, leaves.index(leaf))


def _embeddings(model: Any) -> Any:
    embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
    return getattr(embedding, "weight", None)


def _packed(model: Any) -> dict[str, list[str]]:
    return dict(getattr(model, "packed_modules_mapping", None) or {})


def _served(module: Any, kind: str, home: _Home, published: Tensor) -> Tensor | None:
    """Return the tensor that the module computes with for a published one."""
    whole = getattr(module, kind, None)
    if whole is None:
        return None
    if kind == "weight" and hasattr(module, "cpu_linear") and (whole.numel() == 0 or home.module == "lm_head"):
        whole = _through_kernel(module, published.shape[1], whole.dtype)
    start = sum(module.output_sizes[: home.part]) if home.part else 0
    served: Tensor = whole[start : start + published.shape[0]] if published.dim() else whole
    return served


def _through_kernel(module: Any, width: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix of a linear layer as its kernel computes with it."""
    columns = []
    for first in range(0, width, _ROWS):
        rows = torch.eye(min(_ROWS, width - first), width - first, dtype=dtype)
        rows = torch.nn.functional.pad(rows, (first, 0))
        columns.append(module.quant_method.apply(module, rows, None))
    return torch.cat(columns).T


def _adapts(
    layers: dict[str, Any], packed: dict[str, list[str]], name: str, tensor: Tensor, index: int, scale: float
) -> bool:
    """Return whether a tensor of an adapter is what vLLM has at this index."""
    owner, half, _ = name.removeprefix(_ADAPTER).rsplit(".", 2)
    for home in _homes(owner, packed):
        if home.module in layers:
            layer = layers[home.module]
            served = (layer.lora_a_stacked if half == "lora_A" else layer.lora_b_stacked)[home.part][index, 0]
            expected = tensor.to(served.dtype) * (scale if half == "lora_B" else 1.0)
            return _is(served[: tensor.shape[0], : tensor.shape[1]], expected)
    return False


def _is(served: Tensor | None, tensor: Tensor) -> bool:
    """Return whether the numbers are the same, except for the sign of zero: a product with the identity loses it."""
    if served is None or served.shape != tensor.shape:
        return False
    return bool(torch.equal(served.to("cpu"), tensor.to(served.dtype)))
