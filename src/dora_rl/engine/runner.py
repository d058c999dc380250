"""The seam between scheduling and numbers: a runner computes the logits of rows with the weights of one version.

Three runners stand behind it: `native.runner` for the model families that the C++ kernels know, `generic` for modules
that call the attention interface of `transformers`, and `padded` for those that have attention of their own. All keep
their keys and values in the same paged cache; `choice` says which of them serves a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from dora_rl.core.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from dora_rl.engine.batch import DecodeBatch
    from dora_rl.engine.kv import KvCache
    from dora_rl.engine.token_rows import TokenRows


class Runner(Protocol):
    """A version's weights, ready to compute."""

    stretches: bool
    """It has `decode`."""
    small: bool
    """Its weights are near whoever computes: rows need not share them to be fast."""

    def forward(self, rows: TokenRows, threads: int, record_experts: bool) -> torch.Tensor:
        """Logits [logit_count, vocab] in float32, valid until the next call; the rows' KV is written."""
        ...

    def decode(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int, threads: int) -> int:
        """At most so many decode steps for each of these rows of a batch, in one call; the tokens sampled."""
        ...

    def experts(self) -> npt.NDArray[np.int16]:
        """[count, layers, experts used] of the last recorded forward pass."""
        ...

    def computing_in(self, cache: KvCache) -> AbstractContextManager[None]:
        """Meanwhile forward passes keep their KV in another cache of the same shape. Not while it serves."""
        ...


MakeRunner = Callable[[Mapping[str, Any]], Runner]


def named(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the module from a version's tensors; a tied head may be left out of them."""
    found: dict[str, Any] = {}
    missing = []
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = name if name in tensors else tied.get(name, name)
        if source not in tensors:
            missing.append(name)
            continue
        tensor = tensors[source]
        if tensor.shape != parameter.shape:
            raise ModelError(f"weight '{name}' has the shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
        found[name] = tensor
    if missing:
        raise ModelError(f"the weights lack '{missing[0]}'" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    return found
