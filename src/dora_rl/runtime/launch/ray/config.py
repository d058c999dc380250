"""How a run uses a Ray cluster."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from dora_rl.core.config import Config


class NeedConfig(Config):
    """What one process takes of the cluster, in Ray's words."""

    num_cpus: float = Field(1.0, ge=0)
    """Cores that it holds."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs that it holds; with `model.device = "cuda"` an instance or a trainer rank needs one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Named resources, such as `{ rollout = 1 }`: only nodes that were started with them are taken."""

    def bundle(self) -> dict[str, float]:
        """As a bundle of a placement group, which can't be empty."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}


_REWARD: dict[str, Any] = {"num_cpus": 0.5}
"""Judges mostly wait for completions, so two share a core."""


class RayConfig(Config):
    """The cluster."""

    address: str = ""
    """Of a cluster that runs: `auto` for the one that this machine belongs to, or `HOST:PORT`. Empty: begin one of
    this machine alone, for as long as the run lasts."""
    instances: Literal["all"] | None = None
    """`all`: as many instances as the cluster has room for, also when nodes come and go. Otherwise it is
    `rollout.instances`, and those that find no room wait for it."""
    instance: NeedConfig = NeedConfig()
    """Each instance, and the evaluator."""
    trainer: NeedConfig = NeedConfig()
    """Each rank of the trainer."""
    reward: NeedConfig = NeedConfig(**_REWARD)
    """Each process that judges."""
    shared_folder: bool = False
    """The run's folder is on a file system that every node has: the trainer may be on any node. Otherwise it is on the
    node of the supervisor, which is the one where the command was given."""

    @field_validator("reward", mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """One key that is set does not change the others."""
        return {**_REWARD, **given} if isinstance(given, dict) else given
