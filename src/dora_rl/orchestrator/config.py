"""Configuration of the orchestrator."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from dora_rl.core.config import Config, NameOf
from dora_rl.core.errors import ConfigError
from dora_rl.core.types import InstanceSpec
from dora_rl.orchestrator.adaptive_bound import DEFAULT_CAP, FLOOR
from dora_rl.orchestrator.modes import MODES, MaxStaleness, ModeSpec
from dora_rl.orchestrator.placement import PLACEMENT_RULES, PlacementRule

ModeName = Annotated[str, NameOf("mode", MODES)]
PlacementName = Annotated[str, NameOf("placement rule", PLACEMENT_RULES)]
AdmissionName = Literal["just_in_time", "eager"]
MAX_STALENESS = 64
"""No algorithm learns from older groups, and the step rule looks at each deadline."""


class Deadlines(Config):
    """How long each kind of wait may last, in seconds. Every wait has a deadline, so that nothing stalls silently."""

    load: float = Field(600.0, gt=0)
    """An instance with a slot that takes longer to load a version is given up."""
    move: float = Field(120.0, gt=0)
    """A move that is not reported in time counts as lost; its requests continue from their tokens."""
    score: float = Field(300.0, gt=0)
    """A trajectory whose reward takes longer fails."""
    tool: float = Field(3600.0, gt=0)
    """A trajectory whose environment takes longer to answer fails."""
    heartbeat: float = Field(10.0, gt=0)
    """An instance that has sent no heartbeat for this long counts as lost, however much it has to do."""
    progress: float = Field(600.0, gt=0)
    """An instance whose requests have made no progress for this long counts as lost, even if it sends heartbeats: it
    hangs, or never received them."""
    train: float = Field(7200.0, gt=0)
    """A trainer that takes longer to train or to publish a step is restarted."""
    stall: float = Field(600.0, gt=0)
    """If nothing has made progress for this long, the orchestrator reports who waits for what."""


class ControlConfig(Config):
    """Settings of the orchestrator."""

    mode: ModeName = "dora"
    """How rollout and training interleave."""
    max_staleness: MaxStaleness = 3
    """K: step that trains a group - version of that group is at most this. `sync` uses 0, `one_step_off` 1. `auto`
    (mode `dora`) starts with 1 and chooses K while the run goes on."""
    max_staleness_cap: int = Field(DEFAULT_CAP, ge=FLOOR, le=MAX_STALENESS)
    """The largest K that `max_staleness = "auto"` chooses."""
    groups_per_step: int = Field(..., ge=1)
    """B: number of groups that a step trains, each of them whole."""
    group_size: int = Field(..., ge=1)
    """G: number of trajectories of one prompt."""
    steps: int | None = Field(None, ge=1)
    """Stop after this many steps; unset: when the prompts end."""
    max_response_tokens: int = Field(..., ge=1)
    """Longest response of a trajectory."""
    min_survivors: int = Field(1, ge=1)
    """A group of which fewer trajectories survive fails."""
    dynamic_sampling: int = Field(0, ge=0)
    """N: a group whose rewards are all equal is not trained but replaced by another prompt, if it is among the first
    N * B groups of its version; later ones are trained as they are. 0: all are trained."""
    placement: PlacementName = "deadline"
    """Which rule divides the slots between versions in mode `dora`."""
    admission: AdmissionName = "just_in_time"
    """How many groups idle instances get in mode `dora`: as few as keep the trainer from waiting, so that groups are
    fresh (`just_in_time`), or as many as the bound K allows (`eager`)."""
    stream: bool = True
    """Send finished groups to the trainer while the rest of the step still generates."""
    rebalance_seconds: float = Field(60.0, gt=0)
    """Period of rebalancing slots between versions."""
    kv_reserve_tokens: int = Field(64, ge=0)
    """Tokens of KV cache kept free for the near growth of each running request when new groups are admitted."""
    kv_headroom: float = Field(0.1, ge=0, lt=1)
    """Share of an instance's KV cache that admission leaves free."""
    pack_limit: float = Field(0.9, gt=0, le=1)
    """Share of an instance's KV cache that rebalancing may fill."""
    deadlines: Deadlines = Deadlines()

    @model_validator(mode="after")
    def _rewards_can_differ(self) -> Self:
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError(
                "'dynamic_sampling' needs a 'group_size' of 2 or more: the rewards of one trajectory never differ"
            )
        return self

    @field_validator("max_staleness", mode="wrap")
    @classmethod
    def _bound_or_auto(cls, given: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            value = validate(given)
        except ValidationError:
            value = None
        if value is None or (value != "auto" and not 0 <= value <= MAX_STALENESS):
            raise ValueError(f'must be an integer from 0 to {MAX_STALENESS}, or "auto"')
        return value

    @model_validator(mode="after")
    def _auto_needs_a_bound_that_can_change(self) -> Self:
        if self.adaptive and not self.mode_spec.bound_can_change:
            able = " or ".join(f"'{name}'" for name, mode in MODES.items() if mode.bound_can_change)
            raise ValueError(
                f"'max_staleness' can't be \"auto\" in mode '{self.mode}', which keeps its bound: "
                f"set a number, or 'mode' to {able}"
            )
        return self

    @property
    def mode_spec(self) -> ModeSpec:
        """The row of `mode` in the registry."""
        return MODES[self.mode]

    @property
    def placement_rule(self) -> PlacementRule:
        """The row of `placement` in the registry."""
        return PLACEMENT_RULES[self.placement]

    @property
    def staleness(self) -> int:
        """The staleness bound at the start of a run: `max_staleness`, unless the mode fixes another."""
        return self.mode_spec.staleness(self.max_staleness)

    @property
    def adaptive(self) -> bool:
        """Whether the bound is chosen while the run goes on."""
        return self.max_staleness == "auto"

    @property
    def largest_staleness(self) -> int:
        """The largest bound that can be in force, unless a user changes it when the run is resumed."""
        return self.max_staleness_cap if self.adaptive else self.staleness

    def check_fits(self, spec: InstanceSpec) -> None:
        """Refuse an instance on which a whole group, or the longest trajectory, would not fit."""
        if self.group_size > spec.max_requests:
            raise ConfigError(
                f"'group_size': a group of {self.group_size} does not fit instance {spec.instance}, "
                f"which takes {spec.max_requests} requests"
            )
        if self.max_response_tokens > spec.kv_tokens:
            raise ConfigError(
                f"'max_response_tokens': one trajectory of {self.max_response_tokens} tokens does not fit the KV "
                f"cache of instance {spec.instance}, which holds {spec.kv_tokens}"
            )
