"""Attention over trajectories packed without padding, plugged in through transformers' attention interface.

A packed forward pass has one row of N tokens. Everything except attention treats each token separately and needs no
padding. For attention the tokens are gathered into rows, one per trajectory, and rows of similar length form a bucket
that is padded on the right. Under a causal mask no token attends to padding on its right, so no other mask is needed.

A token may be in several rows: siblings share the tokens of their prompt, which are computed once. The attention output
of such a token is taken from one of its rows (they are equal), and its keys and values receive the gradients of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dora_rl.core.errors import ModelError

NAME = "dora_packed"


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Which tokens attend to which."""

    buckets: tuple[tuple[int, int], ...]
    """(rows, length) of each bucket."""
    inputs: Tensor
    """[M] the packed index of each token of the flattened, concatenated buckets; padding repeats the index of the first
    token of its row and is never read."""
    outputs: Tensor
    """[N] the index of each packed token's output in the flattened, concatenated buckets."""

    def to(self, device: torch.device) -> PackedLayout:
        return PackedLayout(self.buckets, self.inputs.to(device), self.outputs.to(device))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Map [1, H, N, D] queries, keys and values to [1, N, H, D] outputs; the signature is that of transformers."""
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which packed training does not support")
    assert attention_mask is None
    sizes = [rows * length for rows, length in packed.buckets]
    # All buckets are gathered at once: the backward pass adds up their gradients in one pass over the packed tokens.
    gathered = [
        torch.split(tensor[0].transpose(0, 1).index_select(0, packed.inputs), sizes) for tensor in (query, key, value)
    ]
    outputs = []
    for bucket, *tensors in zip(packed.buckets, *gathered, strict=True):
        q, k, v = (tensor.view(*bucket, *tensor.shape[1:]).transpose(1, 2) for tensor in tensors)
        attended = _attend(q, k, v, scaling, dropout, sliding_window, softcap)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, packed.outputs).unsqueeze(0), None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention over [b, H, L, D]; k and v may have fewer heads than q."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    windowed = window is not None and window < length
    if not windowed and softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if windowed:
        assert window is not None
        mask = mask.triu(1 - window)
    if softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
        )
    if grouped:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~mask, -torch.inf)
    return functional.dropout(scores.softmax(-1), dropout) @ v


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
