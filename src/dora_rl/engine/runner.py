"""The interface between scheduling and computing: a runner computes the logits of rows with the weights of one version.

There are three runners: `cpu_kernels.runner` for the model families that the C++ kernels support, `torch_runner` for
modules that call the attention interface of `transformers`, and `padded_runner` for modules with their own attention.
All keep their keys and values in the same paged cache; `kernel_choice` decides which of them serves a model.
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
    """The weights of one version, ready to compute."""

    stretches: bool
    """Whether the runner implements `decode`."""
    small: bool
    """Whether the weights fit into a core's cache, so that rows need not share a pass over them to be fast."""

    def forward(self, rows: TokenRows, threads: int, record_experts: bool) -> torch.Tensor:
        """Write the KV of the rows; return logits [logit_count, vocab] in float32, valid until the next call."""
        ...

    def decode(self, batch: DecodeBatch, rows: npt.NDArray[np.int64], steps: int, threads: int) -> int:
        """Decode at most `steps` tokens for each of these rows of a batch; return the number of sampled tokens."""
        ...

    def experts(self) -> npt.NDArray[np.int16]:
        """Return the experts of the last recorded forward pass, [count, layers, experts used]."""
        ...

    def computing_in(self, cache: KvCache) -> AbstractContextManager[None]:
        """Let forward passes use another cache of the same shape meanwhile; only before the runner serves."""
        ...


MakeRunner = Callable[[Mapping[str, Any]], Runner]


def named(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters of the module by name, from a version's tensors; these may leave out a tied head."""
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
