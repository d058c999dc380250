"""Merges LoRA adapters into the weights that they adapt, both for engines and for exported policies.

Invariants:
- the sum equals what `peft` computes with a separate adapter: alpha / rank times B A is added to linear layers, and its
  transpose to GPT-2's `Conv1D` (which stores its weight as [in, out]) and to embeddings;
- every tensor of the adapter is used. An unused tensor is a `ModelError` that names it, since without it another policy
  would be served under the version's number; this refuses DoRA magnitudes, biases and fully saved layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dora_rl.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""The prefix of all tensor names of `peft`."""
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")


class _Pair(NamedTuple):
    """The names of the two adapter tensors for one weight."""

    a: str
    b: str
    embedding: bool


def merge(
    base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], *, scale: float, transposed: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model, with the adapter added to those that it adapts.

    `transposed` has the names of weights that are stored as [in, out].
    """
    pairs = _pairs(adapter)
    for name, tensor in base:
        pair = pairs.pop(name, None)
        if pair is None:
            yield name, tensor
            continue
        delta = (adapter[pair.b].float() @ adapter[pair.a].float()) * scale
        if pair.embedding or name in transposed:
            delta = delta.T
        yield name, (tensor.float() + delta.to(tensor.device)).to(tensor.dtype)
    if pairs:
        raise ModelError(f"the adapter has tensors for '{min(pairs)}', which is not a weight of the model")


def base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a plain or adapted model without its adapter, under the names of the plain model."""
    for name, tensor in model.state_dict().items():
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), tensor.detach()


def transposed(model: Any) -> set[str]:
    """Names of the weights of a plain or adapted model that are stored as [in, out]."""
    return {
        f"{name.removesuffix('.base_layer')}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D"
    }


def _pairs(adapter: Mapping[str, Tensor]) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    used: set[str] = set()
    for first, second in (_LINEAR, _EMBEDDING):
        for name in adapter:
            other = name.removesuffix(first) + second
            if name.endswith(first) and other in adapter:
                target = name.removesuffix(first).removeprefix(PREFIX) + ".weight"
                pairs[target] = _Pair(name, other, first is _EMBEDDING[0])
                used |= {name, other}
    unused = sorted(adapter.keys() - used)
    if unused:
        raise ModelError(f"the adapter has '{unused[0]}', which can't be merged into the weights")
    return pairs
