"""Log-probs and entropies from hidden states, with at most one copy of the logits of all tokens.

The logits (tokens x vocabulary) are the largest tensor in training a small model with a large vocabulary. Here they are
computed in chunks of tokens. Up to `KEEP_BYTES`, one copy is kept, and the backward pass turns it into its gradient in
place; beyond that, the backward pass computes the logits again, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20  # large enough for full GEMM speed, small enough not to matter beside the weights
KEEP_BYTES = 256 << 20  # a tenth or less of the memory for the activations of as many tokens


def logprobs_and_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[N] log-probs of the targets and [N] entropies, from [N, d] hidden states and [V, d] output embeddings."""
    logprobs, entropy = _Head.apply(hidden, weight, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from [N, V] logits, for models whose head is more than a matrix product."""
    distribution = (logits.float() / temperature).log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def _logits(hidden: Tensor, weight: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    """[n, V] float32 logits, written to `out` if it is given."""
    if out is not None and hidden.dtype == torch.float32:
        logits = torch.mm(hidden, weight.T, out=out)
    else:
        logits = (hidden @ weight.T).float()
        logits = logits if out is None else out.copy_(logits)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        count, vocabulary = len(hidden), len(weight)
        chunk = max(1, CHUNK_BYTES // (4 * vocabulary))
        keep = 4 * count * vocabulary <= KEEP_BYTES and any(ctx.needs_input_grad[:2])
        kept = hidden.new_empty((count, vocabulary), dtype=torch.float32) if keep else None
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        product = weight.to(ctx.dtype)
        logprobs = hidden.new_empty(count, dtype=torch.float32)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            out = None if kept is None else kept[part]
            logits = _logits(hidden[part].to(ctx.dtype), product, temperature, out)
            normaliser[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(1, targets[part, None]).squeeze(1) - normaliser[part]
            log_p = logits - normaliser[part, None]
            entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.kept, ctx.temperature, ctx.chunk = kept, temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_logprobs, grad_entropy = gradients
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        with_entropy = bool(grad_entropy.any())
        product = weight.to(ctx.dtype)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            states = hidden[part].to(ctx.dtype)
            logits = kept[part] if kept is not None else _logits(states, product, ctx.temperature)
            log_p = logits.sub_(normaliser[part, None])
            if with_entropy:
                p = log_p.exp()
                scale = log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_logprobs[part, None])
                grad = p.mul_(scale).neg_()
            else:
                grad = log_p.exp_().mul_(-grad_logprobs[part, None])
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ product
            if grad_weight is not None:
                grad_weight.addmm_(grad.T.to(weight.dtype), states.to(weight.dtype))
        return grad_hidden, grad_weight, None, None
