"""Shared by the tests of `dora_rl.trl`."""

from __future__ import annotations

from typing import Any

from dora_rl import DoraConfig
from dora_rl.runtime.config import RunConfig
from dora_rl.trl.config import GRPOConfig
from dora_rl.trl.mapping import Situation, translate
from tests.api.conftest import job

__all__ = ["job", "resolved"]


def resolved(rows: int | None = 64, device: str = "cpu", balance: float = 0.0, **settings: Any) -> RunConfig:
    """The complete config of the run that a `GRPOConfig` with these settings stands for."""
    situation = Situation(rows=rows, evaluates=True, device=device, expert_balance=balance)
    tree, _ = translate(GRPOConfig(**settings), situation)
    weights = settings.get("reward_weights") or [1.0]
    supplied = {
        "model.path": "the-model",
        "data.source": "the-data.jsonl",
        "reward.functions": ["exact"] * len(weights),
        "evaluation.data": {"source": "held-out.jsonl"},
    }
    return DoraConfig(**tree).resolve(supplied)
