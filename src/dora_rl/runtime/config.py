"""The configuration of a run: one tree, with the config of each component as a section."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from dora_rl.core.config import Config
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.registry import EngineRun, engine_factory
from dora_rl.engine.requests import Sampling
from dora_rl.envs.config import DataConfig, EnvironmentConfig, RewardConfig
from dora_rl.models.loading import ModelConfig
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.runtime.launch.ray.config import RayConfig
from dora_rl.trainer.algorithms import get_algorithm
from dora_rl.trainer.config import TrainerConfig

DUAL_CLIP = 3.0
"""Upper bound of the ratio where the advantage is negative, for stale groups: the value of dual-clip PPO."""


class SamplingConfig(Config):
    """How rollout samples."""

    temperature: float = Field(1.0, ge=0)
    """The trainer uses the same temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the most likely tokens that together have this probability."""
    top_k: int = Field(0, ge=0)
    """Keep this number of the most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens with at least this fraction of the probability of the most likely token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, in addition to the model's end-of-text token."""


_ENGINE: dict[str, Any] = {"kv_bytes": 256 << 20, "host_bytes": 256 << 20}
"""A run has several engines on one machine, so each takes less memory than a single engine would."""


class RolloutConfig(Config):
    """The rollout instances."""

    instances: int = Field(2, ge=1)
    """Number of rollout workers, each with one engine."""
    engine: EngineConfig = EngineConfig(**_ENGINE)
    """The engine of each instance."""
    heartbeat_seconds: float = Field(0.5, gt=0)
    """How often an instance reports its progress."""

    @field_validator("engine", mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """Setting one key does not change the defaults of the others."""
        return {**_ENGINE, **given} if isinstance(given, dict) else given


class EvaluationConfig(Config):
    """Evaluation on held-out prompts, in parallel with training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only on request, by `dora-rl eval`."""
    data: DataConfig | None = None
    """A separate source of held-out problems; if unset, `data.held_out` rows are kept for evaluation."""
    samples: int = Field(1, ge=1)
    """Responses per prompt."""
    temperature: float = Field(1.0, ge=0)
    """0 takes the most likely token."""
    success_threshold: float = 1.0
    """A response with at least this reward counts as a success."""


class CheckpointConfig(Config):
    """Checkpoints, from which a run is resumed."""

    every: int = Field(1, ge=1)
    """Steps between checkpoints. Groups of the steps in between are kept and trained again after a crash."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints kept; with more than one, a damaged checkpoint costs steps and not the run."""


class LoggingConfig(Config):
    """Logs, and where metrics go in addition to `metrics.jsonl`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages in the logs of the supervisor and the workers (`logs/` in the run directory)."""
    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb: str | None = None
    """Project on Weights & Biases; requires the package `wandb`."""
    trackio: str | None = None
    """Project on trackio; requires the package `trackio`."""
    mlflow: str | None = None
    """Experiment of MLflow; requires the package `mlflow` or `mlflow-skinny`, and reads MLFLOW_TRACKING_URI."""
    samples: int = Field(2, ge=0)
    """Groups per step whose texts are written to `samples.jsonl`."""
    completions_every: int = Field(10, ge=0)
    """Steps between tables of these texts on wandb, trackio and MLflow; 0 sends none."""


class SupervisionConfig(Config):
    """How worker processes that fail are restarted."""

    restarts: int = Field(5, ge=0)
    """Restarts in a row before a worker is given up: the run then continues with fewer instances, or ends."""
    backoff_seconds: float = Field(0.5, ge=0)
    """Delay before the first restart; it doubles with each failure in a row."""


class MismatchConfig(Config):
    """How far the engine's log-probs may be from the trainer's for the same weights. The limits apply to the mean of
    the differences over the tokens of a step, and to a tenth of their 99th percentile."""

    warn: FiniteFloat | None = Field(None, gt=0)
    """The run warns above this; if unset: 0.002 for float32, 0.02 for float16, 0.05 for bfloat16."""
    stop: FiniteFloat | None = Field(None, gt=0)
    """The run stops above this; if unset: 0.05 for float32, 0.2 for float16, 0.3 for bfloat16."""


class RunConfig(Config):
    """The configuration of a run."""

    model: ModelConfig
    """The model that is trained."""
    data: DataConfig
    """The prompts."""
    reward: RewardConfig = RewardConfig()
    """What a response is worth."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The environment that answers the policy in tasks of several turns."""
    control: ControlConfig
    """How rollout and training overlap."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollout samples."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout instances."""
    trainer: TrainerConfig = TrainerConfig()
    """How groups are turned into the next version."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, from which a run is resumed."""
    logging: LoggingConfig = LoggingConfig()
    """Logs, and where metrics go."""
    supervision: SupervisionConfig = SupervisionConfig()
    """How worker processes that fail are restarted."""
    mismatch: MismatchConfig = MismatchConfig()
    """How far the engine's log-probs may be from the trainer's."""
    runtime: Literal["local", "ray"] = "local"
    """Where worker processes run: on this machine, or on the nodes of a Ray cluster."""
    ray: RayConfig = RayConfig()
    """The Ray cluster, if the runtime is `ray`."""
    seed: int = Field(0, ge=0)
    """The same seed and prompts give the same trajectories, on any number of instances."""
    threads: int = Field(0, ge=0)
    """Cores of a machine that rollout and training share; 0 uses all, or those that a node gives to Ray."""
    weights: Literal["disk", "memory"] = "disk"
    """Where published versions are stored: on disk they survive a power loss; in shared memory publishing is faster."""
    out: str = "runs"
    """Directory for runs, relative to the working directory; other paths are relative to the config file."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError("'sampling.temperature' must be above 0: a policy that never varies learns nothing")
        if self.trainer.temperature != 1.0 and self.trainer.temperature != self.sampling.temperature:
            raise ValueError("'trainer.temperature' follows 'sampling.temperature'; leave it out")
        if not self.reward.functions and self.environment.kind is None:
            raise ValueError("'reward.functions' is empty: name what a response is worth, for instance [\"exact\"]")
        algorithm = get_algorithm(self.trainer.algorithm.name)
        if self.control.dynamic_sampling and algorithm.learns_from_equal_rewards:
            raise ValueError(
                f"'control.dynamic_sampling' must be 0 with the algorithm '{algorithm.name}', which learns from groups "
                "whose rewards are all equal"
            )
        engine_factory(self.rollout.engine.kind).check_run(self.engine_run())
        if self.runtime == "ray" and self.ray.shared_folder and self.weights == "memory":
            raise ValueError(
                "'weights' must be 'disk' with 'ray.shared_folder': other nodes can't see this node's memory"
            )
        return self

    def trainer_settings(self) -> TrainerConfig:
        """The trainer's settings, with those that follow from other parts of the config.

        A clip does not limit the ratio of a token with a negative advantage that has become likelier since it was
        sampled, and one such token may dominate the gradient of a step. Only stale groups have them.
        """
        algorithm = self.trainer.algorithm
        if algorithm.unlimited and self.control.largest_staleness:
            algorithm = algorithm.model_copy(update={"clip_negative": DUAL_CLIP})
        return self.trainer.model_copy(update={"temperature": self.sampling.temperature, "algorithm": algorithm})

    def engine_run(self) -> EngineRun:
        """The settings that a rollout engine may depend on."""
        return EngineRun(
            model=self.model,
            engine=self.rollout.engine,
            lora=self.trainer.lora,
            mode=self.control.mode,
            mixes_versions=self.control.mode_spec.mixes_versions,
            max_versions=self.control.largest_staleness + 1,
            seed=self.seed,
        )

    def request_sampling(self, stop_ids: tuple[int, ...], *, temperature: float | None = None) -> Sampling:
        """The sampling parameters of a request."""
        return Sampling(
            max_tokens=self.control.max_response_tokens,
            temperature=self.sampling.temperature if temperature is None else temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            min_p=self.sampling.min_p,
            stop=self.sampling.stop,
            stop_ids=stop_ids,
            seed=self.seed,
        )
