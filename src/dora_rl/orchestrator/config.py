"""Configuration of the control plane."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dora_rl.core.config import Config, NameOf
from dora_rl.orchestrator.modes import MODES, ModeSpec
from dora_rl.orchestrator.placement import PLACEMENT_RULES, PlacementRule

ModeName = Annotated[str, NameOf("mode", MODES)]
PlacementName = Annotated[str, NameOf("placement rule", PLACEMENT_RULES)]
AdmissionName = Literal["just_in_time", "eager"]
MOST_STALENESS = 64
"""No algorithm learns from older groups, and the step rule looks at each deadline."""


class Deadlines(Config):
    """How long each kind of wait may last, in seconds. Every wait has one: nothing stalls silently."""

    load: float = Field(600.0, gt=0)
    """A slot that has not loaded a version by then costs its instance."""
    move: float = Field(120.0, gt=0)
    """A move that has not been reported by then counts as lost; the requests go on from their tokens."""
    score: float = Field(300.0, gt=0)
    """A reward that has not come by then is a `failed` verdict for its trajectory."""
    tool: float = Field(3600.0, gt=0)
    """An environment that has not answered by then is a `failed` verdict for its trajectory."""
    heartbeat: float = Field(10.0, gt=0)
    """An instance that has given no sign of life for so long counts as lost, however much it has to do."""
    progress: float = Field(600.0, gt=0)
    """An instance that lives, but whose requests have not moved on for so long, counts as lost too: it hangs, or was
    never told of them."""
    train: float = Field(7200.0, gt=0)
    """A trainer that has not finished, or not published, a step by then is restarted."""
    stall: float = Field(600.0, gt=0)
    """If nothing has moved for so long, the orchestrator says who waits for what."""


class ControlConfig(Config):
    """What is asked of the orchestrator."""

    mode: ModeName = "dora"
    """How rollout and training interleave."""
    max_staleness: int = Field(3, ge=0, le=MOST_STALENESS)
    """K: step that trains a group - version of that group is at most this. `sync` uses 0, `one_step_off` 1."""
    groups_per_step: int = Field(..., ge=1)
    """B: a step trains exactly so many whole groups."""
    group_size: int = Field(..., ge=1)
    """G: trajectories of one prompt."""
    steps: int | None = Field(None, ge=1)
    """Stop after so many steps; unset: when the prompts end."""
    max_response_tokens: int = Field(..., ge=1)
    """No trajectory is longer."""
    min_survivors: int = Field(1, ge=1)
    """A group with fewer unfailed siblings is a `failed` verdict."""
    placement: PlacementName = "deadline"
    """Which rule partitions the slots over versions in mode `dora`."""
    admission: AdmissionName = "eager"
    """When idle instances get new groups in mode `dora`: as soon as the bound K allows (`eager`), or as late as the
    trainer allows, so that groups are fresh (`just_in_time`)."""
    stream: bool = True
    """Send finished groups to the trainer while the rest of the step still generates."""
    rebalance_seconds: float = Field(60.0, gt=0)
    """The periodic trigger for re-partitioning."""
    kv_reserve_tokens: int = Field(64, ge=0)
    """Room kept for the near growth of each running request when new groups are admitted."""
    kv_headroom: float = Field(0.1, ge=0, lt=1)
    """Share of an instance's KV room that admission leaves free."""
    pack_limit: float = Field(0.9, gt=0, le=1)
    """How full re-partitioning may pack the slots of a draining version."""
    deadlines: Deadlines = Deadlines()

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
        """The staleness bound: `max_staleness`, unless the mode fixes another."""
        return self.mode_spec.staleness(self.max_staleness)
