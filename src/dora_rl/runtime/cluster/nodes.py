"""What the cluster has: nodes, their cores, and room for instances."""

from __future__ import annotations

from collections import Counter

import ray

from dora_rl.runtime.cluster.config import RayConfig


def nodes() -> dict[str, dict[str, float]]:
    """The resources of each node that is alive."""
    return {one["NodeID"]: one["Resources"] for one in ray.nodes() if one["Alive"]}


def cores_of(node: str) -> int:
    """Cores that a node gives to Ray."""
    return max(1, int(nodes().get(node, {}).get("CPU", 1)))


def room(config: RayConfig, supervisor: str) -> int:
    """How many instances fit onto the nodes beside the trainer; one too many would wait for room."""
    need = config.instance.bundle()
    found = 0
    for node, has in nodes().items():
        left = Counter(has)
        if node == supervisor:
            left.subtract(config.trainer.bundle())
        found += max(0, min(int(left[name] / amount + 1e-9) for name, amount in need.items()))
    return found
