"""LoRA adapters added to the weights that they adapt: the one merge, for engines and for exported policies.

Invariants:
- the sum is what `peft` computes with the adapter beside the base: alpha / rank times B A for linear layers, transposed
  for GPT-2's `Conv1D` (which keeps its weight as [in, out]) and for embeddings;
- every tensor of the adapter is used: one that is not is a `ModelError`, since without it another policy would be
  served under the version's name. That refuses DoRA's magnitudes, biases and whole saved layers, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dora_rl.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""Before each name that `peft` gives."""
_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")


class _Pair(NamedTuple):
    """The two halves for one weight, by their names in the adapter."""

    a: str
    b: str
    embedding: bool


def merge(
    base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], *, scale: float, transposed: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the plain model, with the adapter added to those that it adapts.

    `transposed` are the names of weights that lie as [in, out].
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
        raise ModelError(f"the adapter has a part for '{min(pairs)}', which is no weight of the model")


def transposed(model: Any) -> set[str]:
    """Names of the weights of a plain or adapted model that lie as [in, out]."""
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
