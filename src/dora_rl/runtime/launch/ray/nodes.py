"""What the cluster has: nodes, their cores, and capacity for instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from dora_rl.runtime.config import RunConfig


def nodes() -> dict[str, dict[str, float]]:
    """The resources of each node that is alive."""
    return {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}


def cores_of(node: str) -> int:
    """Cores that a node gives to Ray."""
    return max(1, int(nodes().get(node, {}).get("CPU", 1)))


def capacity(config: RunConfig, supervisor: str) -> int:
    """How many instances fit onto the nodes beside the trainer and the evaluator; any more would stay pending."""
    need, rank = config.ray.instance.bundle(), config.ray.trainer.bundle()
    left = nodes()
    for _ in range(config.trainer.ranks):
        costs = {
            node: _fit(has, need) - _fit(_without(has, rank), need)
            for node, has in left.items()
            if _fit(has, rank) and (node == supervisor or config.ray.shared_folder)
        }
        if costs:  # it is not known which node Ray will choose: assume the one that costs most instances
            costliest = max(costs, key=costs.__getitem__)
            left[costliest] = _without(left[costliest], rank)
    count = sum(_fit(has, need) for has in left.values())
    return count - 1 if config.evaluation.every and count > 1 else count


def _fit(has: Mapping[str, float], need: Mapping[str, float]) -> int:
    """How many times a bundle fits."""
    return max(0, min(int(has.get(name, 0.0) / amount + 1e-9) for name, amount in need.items()))


def _without(has: Mapping[str, float], need: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - need.get(name, 0.0) for name, amount in has.items()}
