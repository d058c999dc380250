"""How a run uses a Ray cluster."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from dora_rl.core.config import Config


class NeedConfig(Config):
    """The resources that one worker reserves, in Ray's terms."""

    num_cpus: float = Field(1.0, ge=0)
    """Cores."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs; with `model.device = "cuda"` an instance or a trainer rank needs one."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources, such as `{ rollout = 1 }`: only nodes that were started with them are used."""

    def bundle(self) -> dict[str, float]:
        """The bundle of a placement group, which can't be empty."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount} or {"CPU": 0.001}


_REWARD: dict[str, Any] = {"num_cpus": 0.5}
"""Reward workers mostly wait for responses, so two share a core."""


class RayConfig(Config):
    """The Ray cluster of a run."""

    address: str = ""
    """Address of a running cluster: `auto` for the one that this machine belongs to, or `HOST:PORT`. If empty, a
    cluster of this machine alone is started for the duration of the run."""
    instances: Literal["all"] | None = None
    """`all` starts as many instances as the cluster has resources for, also when nodes join or leave. If unset, the
    number is `rollout.instances`, and instances without resources wait for them."""
    instance: NeedConfig = NeedConfig()
    """Resources of each instance, and of the evaluator."""
    trainer: NeedConfig = NeedConfig()
    """Resources of each rank of the trainer."""
    reward: NeedConfig = NeedConfig(**_REWARD)
    """Resources of each reward worker."""
    shared_folder: bool = False
    """The run directory is on a file system that all nodes share, so the trainer may be on any node. Otherwise the
    trainer is on the supervisor's node, which is the one where the command was started."""

    @field_validator("reward", mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """Setting one key does not change the defaults of the others."""
        return {**_REWARD, **given} if isinstance(given, dict) else given
