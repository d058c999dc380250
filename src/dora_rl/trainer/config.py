"""The trainer's configuration."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from dora_rl.core.config import Config
from dora_rl.trainer.algorithms import all_algorithms, get_algorithm
from dora_rl.trainer.algorithms.algorithm import Aggregation, Clip, Correction


class AlgorithmConfig(Config):
    """What is optimised. What is left out is the algorithm's own."""

    name: str = Field(default="grpo", description=f"One of: {', '.join(all_algorithms())}.")
    aggregation: Aggregation | None = None
    """How token losses are averaged."""
    constant_length: int | None = Field(default=None, gt=0)
    """Tokens by which `constant_length` divides each trajectory: the longest response allowed."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is bounded below by 1 - clip_low."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is bounded above by 1 + clip_high."""
    clip_negative: float | None = Field(default=None, gt=1)
    """The ratio is bounded above by this where the advantage is negative."""
    correction: Correction = "none"
    """What is done about the gap between the engine's and the trainer's log-probs."""
    correction_low: float = Field(default=0.5, ge=0)
    """Masks drop what has a gap below this."""
    correction_high: float = Field(default=2.0, gt=0)
    """Truncation caps the gap here; masks drop what lies above."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference policy, the one that training started from."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    no_signal: Literal["train", "skip"] = "train"
    """A group whose advantages are all zero counts in the average like any other, or is left out of it. Where its
    gradient is zero, it is not computed."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return get_algorithm(name).name

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.averaging == "constant_length" and self.constant_length is None:
            raise ValueError(f"'{self.name}' divides by a constant length: set constant_length")
        return self

    @property
    def averaging(self) -> Aggregation:
        """How token losses are averaged, set or usual."""
        return self.aggregation or get_algorithm(self.name).aggregation

    @property
    def bounds(self) -> Clip:
        """The algorithm's clip with what is set here."""
        usual = get_algorithm(self.name).clip
        return Clip(
            usual.low if self.clip_low is None else self.clip_low,
            usual.high if self.clip_high is None else self.clip_high,
            usual.negative if self.clip_negative is None else self.clip_negative,
        )


class OptimiserConfig(Config):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """The highest of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the moments."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; vectors (norms, biases) are not decayed."""
    warmup_updates: int = Field(default=0, ge=0)
    """The learning rate grows linearly from zero over so many updates."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine fall to `final_share` at `total_updates`."""
    total_updates: int | None = Field(default=None, gt=0)
    """Where a falling schedule ends."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate at the end of a falling schedule."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    offload: bool = False
    """Keep the optimiser's state and its copy of the weights in host memory and update there."""

    @model_validator(mode="after")
    def _has_end(self) -> Self:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f"the schedule '{self.schedule}' needs total_updates")
        return self


class LoraConfig(Config):
    """Train a low-rank adapter over frozen weights."""

    rank: int = Field(default=16, gt=0)
    """Inner dimension."""
    alpha: int = Field(default=32, gt=0)
    """The adapter is scaled by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get one: linear layers or, unless they are tied to the output, the embeddings."""

    @property
    def scale(self) -> float:
        """What the adapter is multiplied by."""
        return self.alpha / self.rank


class MoeConfig(Config):
    """For mixture-of-experts models."""

    replay_routing: bool = True
    """Use the experts that rollout used, where the trajectory says which."""
    auxiliary_loss: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss."""


class TrainerConfig(Config):
    """How groups become the next version."""

    ranks: int = Field(1, ge=1)
    """Processes that train together; weights, gradients and optimiser are sharded over them by FSDP2."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimised."""
    optimiser: OptimiserConfig = OptimiserConfig()
    """How it is optimised."""
    lora: LoraConfig | None = None
    """None trains all weights."""
    moe: MoeConfig = MoeConfig()
    """For mixture-of-experts models."""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """Tokens in one forward and backward pass, on each process."""
    mini_batches: int = Field(default=1, gt=0)
    """Optimiser updates into which a step's groups are divided."""
    epochs: int = Field(default=1, gt=0)
    """Passes over the groups of a step."""
    temperature: float = Field(default=1.0, gt=0)
    """The one that rollout sampled with."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, to save memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products; weights, gradients and optimiser stay float32."""

    @property
    def streams(self) -> bool:
        """Gradients can be computed as groups come: one update, and advantages that need only their own group."""
        return self.mini_batches == self.epochs == 1 and get_algorithm(self.algorithm.name).scope == "group"
