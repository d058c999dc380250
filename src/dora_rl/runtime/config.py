"""The configuration of a run: one tree, each part's own config as a section."""

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
from dora_rl.trainer.config import TrainerConfig


class SamplingConfig(Config):
    """How rollout samples."""

    temperature: float = Field(1.0, ge=0)
    """The trainer uses the same."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens that together have this probability."""
    top_k: int = Field(0, ge=0)
    """Keep so many of the likeliest tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this fraction as likely as the likeliest."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the model's own end of text."""


_ENGINE: dict[str, Any] = {"kv_bytes": 256 << 20, "host_bytes": 256 << 20}
"""A run has several engines on one machine, so each takes less than one alone would."""


class RolloutConfig(Config):
    """The rollout instances."""

    instances: int = Field(2, ge=1)
    """Processes with an engine each."""
    engine: EngineConfig = EngineConfig(**_ENGINE)
    """Each of them."""
    heartbeat_seconds: float = Field(0.5, gt=0)
    """How often an instance says how far it is."""

    @field_validator("engine", mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """One key that is set does not change the others."""
        return {**_ENGINE, **given} if isinstance(given, dict) else given


class EvaluationConfig(Config):
    """Evaluation on held-out prompts, beside training."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only when asked for by `dora-rl eval`."""
    data: DataConfig | None = None
    """Held-out problems from a source of their own; otherwise `data.held_out` rows are kept for it."""
    samples: int = Field(1, ge=1)
    """Responses to each prompt."""
    temperature: float = Field(1.0, ge=0)
    """0 takes the likeliest token."""
    success_threshold: float = 1.0
    """A response with at least this reward counts as right."""


class CheckpointConfig(Config):
    """What a run can go on from."""

    every: int = Field(1, ge=1)
    """Steps between checkpoints. Groups of the steps in between are kept, and trained again after a crash."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept; more than one, so that a damaged one costs steps and not the run."""


class LoggingConfig(Config):
    """Where figures go besides `metrics.jsonl`."""

    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb: str | None = None
    """Project on Weights & Biases; needs the package `wandb`."""
    trackio: str | None = None
    """Project of trackio; needs the package `trackio`."""
    samples: int = Field(2, ge=0)
    """Groups of each step whose texts go to `samples.jsonl`."""


class SupervisionConfig(Config):
    """What is done about processes that fail."""

    restarts: int = Field(5, ge=0)
    """A process that failed so often in a row is given up: the run goes on with fewer instances, or ends."""
    backoff_seconds: float = Field(0.5, ge=0)
    """Before the first restart; doubles with each failure in a row."""


class MismatchConfig(Config):
    """How far the engine's log-probs may be from the trainer's, where both are of the same weights. Compared are the
    mean over the tokens of a step, and a tenth of their 99th percentile."""

    warn: FiniteFloat | None = Field(None, gt=0)
    """Above this the run warns; unset: 0.002 for float32, 0.02 for float16, 0.05 for bfloat16."""
    stop: FiniteFloat | None = Field(None, gt=0)
    """Above this the run stops; unset: 0.05 for float32, 0.2 for float16, 0.3 for bfloat16."""


class RunConfig(Config):
    """Everything about a run."""

    model: ModelConfig
    """Which model is trained."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig = RewardConfig()
    """What a response is worth."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Who answers the policy, where it takes several turns."""
    control: ControlConfig
    """How rollout and training interleave."""
    sampling: SamplingConfig = SamplingConfig()
    """How rollout samples."""
    rollout: RolloutConfig = RolloutConfig()
    """The instances."""
    trainer: TrainerConfig = TrainerConfig()
    """How groups become the next version."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """On held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What a run can go on from."""
    logging: LoggingConfig = LoggingConfig()
    """Where figures go."""
    supervision: SupervisionConfig = SupervisionConfig()
    """What is done about processes that fail."""
    mismatch: MismatchConfig = MismatchConfig()
    """How far engine and trainer may be apart."""
    runtime: Literal["local", "ray"] = "local"
    """Where the processes are: on this machine, or on the nodes of a Ray cluster."""
    ray: RayConfig = RayConfig()
    """The cluster, if the runtime is `ray`."""
    seed: int = Field(0, ge=0)
    """Same seed and prompts, same trajectories, on any number of instances."""
    threads: int = Field(0, ge=0)
    """Cores of a machine that rollout and training share; 0 takes all, or what a node gives to Ray."""
    weights: Literal["disk", "memory"] = "disk"
    """Where published versions live: on disk they survive a power loss, in shared memory publishing is quicker."""
    out: str = "runs"
    """Folder for runs, from where the command is given; other paths start at the config file."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError("'sampling.temperature' must be above 0: a policy that never varies learns nothing")
        if self.trainer.temperature != 1.0 and self.trainer.temperature != self.sampling.temperature:
            raise ValueError("'trainer.temperature' follows 'sampling.temperature'; leave it out")
        if not self.reward.functions and self.environment.kind is None:
            raise ValueError("'reward.functions' is empty: name what a response is worth, for instance [\"exact\"]")
        engine_factory(self.rollout.engine.kind).check_run(self.engine_run())
        if self.runtime == "ray" and self.ray.shared_folder and self.weights == "memory":
            raise ValueError("'weights' must be 'disk' with 'ray.shared_folder': no other node sees this one's memory")
        return self

    def engine_run(self) -> EngineRun:
        """The settings that a rollout engine may depend on."""
        return EngineRun(
            model=self.model,
            engine=self.rollout.engine,
            lora=self.trainer.lora,
            mode=self.control.mode,
            mixes_versions=self.control.mode_spec.mixes_versions,
            max_versions=self.control.staleness + 1,
            seed=self.seed,
        )

    def request_sampling(self, stop_ids: tuple[int, ...], *, temperature: float | None = None) -> Sampling:
        """The engine's view of it."""
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
