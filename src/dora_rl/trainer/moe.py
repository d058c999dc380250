"""Mixture of experts: records the routing of a model, and replays the routing of rollout where trajectories have it.

All routers of `transformers` return (logits, weights, indices). Replay keeps the logits, and so the gradient to the
router, and takes the indices from rollout: a token is trained through the experts that rollout sent it to. Replay
supports the routers that weight experts by a softmax over all of them (Qwen-MoE, OLMoE, Mixtral).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dora_rl.core.errors import ModelError
from dora_rl.trainer.config import MoeConfig

# Router class -> whether the weights of the chosen experts always sum to one; None: the router has a setting for it.
_SOFTMAX_ROUTERS: dict[str, bool | None] = {
    "Qwen2MoeTopKRouter": None,
    "Qwen3MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "MixtralTopKRouter": True,
}


class Routers:
    """Hooks on all routers of a model, which replay and record the routing of the forward pass after `begin`."""

    def __init__(self, model: nn.Module, config: MoeConfig, *, packed: bool = True) -> None:
        self._replay = config.replay_routing
        self._packed = packed
        self._experts: Tensor | None = None
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        self.routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        if config.auxiliary_loss and self.routers and not packed:
            raise ModelError(
                f"{type(model).__name__} is trained in padded batches, which can't measure the load of its experts: "
                "set trainer.moe.auxiliary_loss = 0"
            )
        for layer, router in enumerate(self.routers if packed else ()):
            router.register_forward_hook(self._hook(layer))

    def begin(self, experts: Tensor | None) -> None:
        """Prepare for a forward pass; `experts` [P, L, E] are those that rollout used."""
        self._seen.clear()
        self._experts = experts if self._replay else None
        if self._experts is None or not self.routers:
            return
        if self._experts.shape[1] != len(self.routers):
            raise ModelError(
                f"the trajectories have the experts of {self._experts.shape[1]} layers, "
                f"but the model has {len(self.routers)} layers with routers"
            )
        self.check_replay()

    def check_replay(self) -> None:
        """Refuse to replay routing, if the settings ask for it, with routers for which replay is not supported."""
        unknown = {type(router).__name__ for router in self.routers} - _SOFTMAX_ROUTERS.keys()
        if self._replay and unknown:
            names = ", ".join(sorted(unknown))
            raise ModelError(f"routing can't be replayed with {names}: set trainer.moe.replay_routing = false")
        if self._replay and self.routers and not self._packed:
            raise ModelError(
                "routing can't be replayed in a model that is trained in padded batches: "
                "set trainer.moe.replay_routing = false"
            )

    def load(self) -> list[Tensor]:
        """For each layer, [experts] the number of tokens of each expert in the last forward pass."""
        return [
            torch.bincount(indices.flatten(), minlength=logits.shape[-1]) for logits, indices in self._seen.values()
        ]

    def margins(self) -> Tensor | None:
        """[P] how close each token of the last forward pass was to another choice of experts: the smallest difference,
        over the layers, between the logits of the last chosen and the first rejected expert. None if it is not known
        whether the routers choose by logits."""
        if not self.routers or any(type(router).__name__ not in _SOFTMAX_ROUTERS for router in self.routers):
            return None
        differences = []
        for logits, indices in self._seen.values():
            chosen = indices.shape[-1]
            if chosen < logits.shape[-1]:
                ranked = logits.float().topk(chosen + 1, dim=-1).values
                differences.append(ranked[:, -2] - ranked[:, -1])
        return torch.stack(differences).amin(0) if differences else None

    def auxiliary_loss(self) -> Tensor:
        """Load-balancing loss (Fedus et al., arXiv 2101.03961): layer mean of experts * sum(share * probability)."""
        losses = []
        for logits, indices in self._seen.values():
            experts = logits.shape[-1]
            share = torch.bincount(indices.flatten(), minlength=experts) / len(logits)
            losses.append(experts * (share * logits.float().softmax(-1).mean(0)).sum())
        return torch.stack(losses).mean()

    def _hook(self, layer: int) -> Any:
        def hook(router: nn.Module, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if len(output) != 3:
                return output  # an unsupported router; `check_replay` refuses to replay it
            logits, weights, indices = output
            if self._experts is not None:
                wanted = self._experts[:, layer]
                indices = torch.where(wanted >= 0, wanted, indices)
                weights = _weights(router, logits, indices).to(weights.dtype)
            # Recomputation in the backward pass gets here again with equal values; the first graph is the one in use.
            self._seen.setdefault(layer, (logits, indices))
            return logits, weights, indices

        return hook


def _weights(router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
    chosen = logits.float().softmax(-1).gather(-1, indices)
    normalise = _SOFTMAX_ROUTERS[type(router).__name__]
    if normalise if normalise is not None else router.norm_topk_prob:
        return chosen / chosen.sum(-1, keepdim=True)
    return chosen
