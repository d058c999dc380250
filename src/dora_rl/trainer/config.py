"""The trainer's configuration. It imports neither torch nor numpy, so that command lines start quickly."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from dora_rl.core.config import Config
from dora_rl.trainer.algorithms import all_algorithms, get_algorithm
from dora_rl.trainer.algorithms.algorithm import Aggregation, Clip, Correction, TrustRegion
from dora_rl.trainer.algorithms.losses import ppo_clip

_DELTA: dict[TrustRegion, float] = {"binary_tv": 0.15, "binary_kl": 0.05, "second_moment": 0.04}
"""Default thresholds of the trust regions, as in the papers."""


class AlgorithmConfig(Config):
    """The objective. Settings that are left out take the algorithm's defaults."""

    name: str = Field(default="grpo", description=f"One of: {', '.join(all_algorithms())}.")
    aggregation: Aggregation | None = None
    """How token losses are averaged."""
    constant_length: int | None = Field(default=None, gt=0)
    """Number of tokens by which the aggregation `constant_length` divides: usually the longest response allowed."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The lower bound of the ratio is 1 - clip_low."""
    clip_high: float | None = Field(default=None, ge=0)
    """The upper bound of the ratio is 1 + clip_high."""
    clip_negative: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio where the advantage is negative. By default 3 for longcat, and in runs whose groups may
    be stale, if nothing else limits that ratio."""
    trust_region: TrustRegion = "clip"
    """What limits an update: the clip of the ratio, or in its place a mask on tokens that have diverged too far."""
    trust_region_delta: float | None = Field(default=None, gt=0)
    """The divergence above which tokens are masked: by default 0.15 for binary_tv, 0.05 for binary_kl, and 0.04 for
    second_moment."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Leave out a trajectory with a negative advantage if the ratio of one of its tokens is below this."""
    correction: Correction = "none"
    """How the gap between the behaviour policy and the trainer's policy at the start of the step is corrected."""
    correction_low: float | None = Field(default=None, ge=0)
    """Masks drop tokens or trajectories with a gap below this: by default 0.5, and 0.9 for geometric_mask."""
    correction_high: float | None = Field(default=None, gt=0)
    """Truncation caps the gap at this, and masks drop what is above it: by default 2, and 1.1 for geometric_mask."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the reference policy, which is the policy that training started from."""
    kl_ratio: bool = False
    """Multiply the KL estimate of a token by its ratio, so that its gradient is that of KL(policy || reference)."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    no_signal: Literal["train", "skip"] = "train"
    """Whether a group whose advantages are all zero counts in the average or is left out of it. Where its gradient is
    zero, it is not computed."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return get_algorithm(name).name

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.averaging == "constant_length" and self.constant_length is None:
            raise ValueError(f"'{self.name}' divides by a constant length: set constant_length")
        return self

    @model_validator(mode="after")
    def _has_trust_region(self) -> Self:
        if self.trust_region == "clip":
            if self.trust_region_delta is not None:
                raise ValueError("trust_region_delta has no effect on a clip: set trust_region, or clip_low, clip_high")
            return self
        if get_algorithm(self.name).policy_loss is not ppo_clip:
            raise ValueError(
                f"trust_region = '{self.trust_region}' replaces a clip of token ratios, which '{self.name}' does not "
                "have: choose another algorithm, such as grpo or dapo, or leave trust_region out"
            )
        for key in ("clip_low", "clip_high", "clip_negative"):
            if getattr(self, key) is not None:
                raise ValueError(
                    f"{key} has no effect with trust_region = '{self.trust_region}': leave one of them out"
                )
        return self

    @model_validator(mode="after")
    def _has_ratios(self) -> Self:
        if self.veto is not None and self.name == "supervised":
            raise ValueError("'supervised' has no ratios to veto: leave veto out")
        return self

    @property
    def averaging(self) -> Aggregation:
        """How token losses are averaged: the setting, or else the algorithm's default."""
        return self.aggregation or get_algorithm(self.name).aggregation

    @property
    def bounds(self) -> Clip:
        """The clipping bounds: the settings, or else the algorithm's defaults."""
        default = get_algorithm(self.name).clip
        return Clip(
            default.low if self.clip_low is None else self.clip_low,
            default.high if self.clip_high is None else self.clip_high,
            default.negative if self.clip_negative is None else self.clip_negative,
        )

    @property
    def delta(self) -> float:
        """The threshold of a trust region that is no clip: the setting, or else its default."""
        return _DELTA[self.trust_region] if self.trust_region_delta is None else self.trust_region_delta

    @property
    def unlimited(self) -> bool:
        """Whether nothing limits the ratio of a token with a negative advantage from above."""
        clips_tokens = self.trust_region == "clip" and get_algorithm(self.name).policy_loss is ppo_clip
        return clips_tokens and self.bounds.negative is None and self.correction == "none"

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The lower and upper bound of the correction: the settings, or else its defaults."""
        low, high = (0.9, 1.1) if self.correction == "geometric_mask" else (0.5, 2.0)
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


class OptimiserConfig(Config):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """The highest learning rate of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of matrices; vectors (norms, biases) are not decayed."""
    warmup_updates: int = Field(default=0, ge=0)
    """Number of updates over which the learning rate grows linearly from zero."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up; linear and cosine fall to `final_share` at `total_updates`."""
    total_updates: int | None = Field(default=None, gt=0)
    """The update at which a falling schedule ends."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate at the end of a falling schedule."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""
    ess_scaling: bool = False
    """Multiply the learning rate of an update by the square root of its relative effective sample size."""
    offload: bool = False
    """Keep the optimiser's state and its copy of the weights in host memory, and run the update there."""

    @model_validator(mode="after")
    def _has_end(self) -> Self:
        if self.schedule != "constant" and self.total_updates is None:
            raise ValueError(f"the schedule '{self.schedule}' needs total_updates")
        return self


class LoraConfig(Config):
    """A low-rank adapter that is trained over frozen weights."""

    rank: int = Field(default=16, gt=0)
    """Inner dimension of the adapter."""
    alpha: int = Field(default=32, gt=0)
    """The adapter is scaled by alpha / rank."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter: linear layers, or embeddings that are not tied to the output."""

    @property
    def scale(self) -> float:
        """The factor by which the adapter is multiplied."""
        return self.alpha / self.rank


class MoeConfig(Config):
    """Settings of mixture-of-experts models."""

    replay_routing: bool = True
    """Route each token to the experts that rollout used, where the trajectory has recorded them."""
    auxiliary_loss: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss."""


class TrainerConfig(Config):
    """How the trainer computes the next version from groups."""

    ranks: int = Field(1, ge=1)
    """Number of trainer processes; weights, gradients and optimiser state are sharded over them by FSDP2."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The objective."""
    optimiser: OptimiserConfig = OptimiserConfig()
    """AdamW and its schedule."""
    lora: LoraConfig | None = None
    """The adapter to train; without this section, all weights are trained."""
    moe: MoeConfig = MoeConfig()
    """Settings of mixture-of-experts models."""
    micro_batch_tokens: int = Field(default=4096, gt=0)
    """Tokens in one forward and backward pass of each rank."""
    mini_batches: int = Field(default=1, gt=0)
    """Number of optimiser updates over which the groups of a step are divided."""
    epochs: int = Field(default=1, gt=0)
    """Passes over the groups of a step."""
    temperature: float = Field(default=1.0, gt=0)
    """The temperature that rollout samples with."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of matrix products; weights, gradients and optimiser state stay float32."""

    measure_gap_every: int = Field(default=0, ge=0)
    """Every so many steps, measure on one micro-batch of stale trajectories how much of their gap comes from the engine
    and how much from staleness; this holds past versions in host memory. 0 turns it off."""

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        if self.optimiser.ess_scaling and self.algorithm.name == "supervised":
            raise ValueError("'supervised' has no importance weights to scale by: set optimiser.ess_scaling = false")
        return self

    @property
    def streams(self) -> bool:
        """Whether gradients can be computed as groups arrive: one update, and neither advantages nor a trust region
        that need all groups of the update."""
        whole = get_algorithm(self.algorithm.name).scope == "step" or self.algorithm.trust_region == "second_moment"
        return self.mini_batches == self.epochs == 1 and not whole
