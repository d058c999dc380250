"""Configuration of data, rewards and environments."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, FiniteFloat, model_validator

from dora_rl.core.config import Config


class DataConfig(Config):
    """The source of the problems."""

    source: str
    """`FILE.jsonl`, `.json` or `.parquet`; `datasets:NAME[:SPLIT]`; `reasoning_gym:NAME`; or a `FILE.py:function` or
    `module:function` that returns rows."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the dataset or function that `source` names."""
    prompt: str = Field(default="prompt", min_length=1)
    """Column with the prompt: a text or a list of messages."""
    answer: str = Field(default="answer", min_length=1)
    """Column with the answer; dots reach into objects, as in `reward_model.ground_truth`."""
    system: str | None = None
    """System message put before every prompt, which turns texts into chats; an empty one makes a chat without it."""
    limit: int | None = Field(default=None, ge=1)
    """Number of rows to read; the rows after them are left out."""
    held_out: int = Field(default=0, ge=0)
    """Number of rows, at the end of those read, that are kept for evaluation and never trained."""
    shuffle: bool = True
    """Train in a different order each epoch."""
    seed: int = 0
    """Seed of the order and of generated data."""
    size: int = Field(default=1000, ge=1)
    """Number of rows to generate (`reasoning_gym`), including the `held_out` ones."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the training rows; unset: as many as the run needs."""

    @model_validator(mode="after")
    def _no_remote_code(self) -> Self:
        if "trust_remote_code" in self.params:
            raise ValueError("params.trust_remote_code is not supported: convert that dataset to parquet or JSONL")
        return self


class RewardConfig(Config):
    """How completions are rewarded."""

    functions: list[str] = Field(default_factory=list)
    """Builtins (`exact`, `contains`, `number`, `math`, `reasoning_gym`, `code`, `format:REGEX`), `FILE.py:function`
    or `module:function`; the reward is their weighted sum."""
    weights: list[FiniteFloat] | None = None
    """One weight per function; unset: 1 each."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """The trajectory fails if scoring it takes longer."""
    workers: int = Field(default=1, ge=1)
    """Reward workers: processes that score in parallel."""
    concurrency: int = Field(default=1, ge=1)
    """Completions that each worker scores at a time, in threads: more than 1 for functions that wait for other machines
    or are async. Signals work only with 1, and so does `math`, which uses them."""

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.functions):
            raise ValueError(f"weights has {len(self.weights)} entries for {len(self.functions)} functions")
        return self

    @model_validator(mode="after")
    def _signals_work(self) -> Self:
        if self.concurrency > 1 and "math" in self.functions:
            raise ValueError(
                "concurrency must be 1 with the function 'math', which uses signals; raise workers instead"
            )
        return self


class EnvironmentConfig(Config):
    """The environment, for trajectories of several turns."""

    kind: str | None = None
    """`FILE.py:Class` or `module:Class`; unset: one turn."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int = Field(default=8, ge=1)
    """The trajectory ends after this many turns of the policy."""
    timeout_seconds: float = Field(default=60.0, gt=0)
    """The trajectory fails if one reset or step takes longer."""
    concurrency: int = Field(default=1, ge=1)
    """Environments that each of the `reward.workers` steps at a time, in threads: more than 1 for environments that
    wait for tools or other machines, or are async. Signals work only with 1."""
