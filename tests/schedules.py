"""Random schedules: a configuration, a plan of faults and a seed, all drawn from one number."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from dora_rl.orchestrator.config import ControlConfig, Deadlines, ModeName
from dora_rl.sim.chaos import ChaosPlan, ChaosRuntime

# Short against the schedule's time, so that deadlines pass while things are merely slow.
DEADLINES = Deadlines(load=20, move=20, score=20, tool=40, heartbeat=15, progress=15, train=30, stall=10)
MODES: tuple[ModeName, ...] = ("dora", "dora", "dora", "dora", "dora", "sync", "one_step_off", "partial")


def draw_config(random_: random.Random, mode: ModeName | None = None) -> ControlConfig:
    return ControlConfig(
        mode=mode or random_.choice(MODES),
        max_staleness=random_.randint(0, 4),
        groups_per_step=random_.randint(1, 4),
        group_size=random_.randint(1, 3),
        max_response_tokens=64,
        placement=random_.choice(("deadline", "deadline", "proportional")),
        stream=random_.random() < 0.5,
        rebalance_seconds=5,
        kv_reserve_tokens=random_.choice((0, 4)),
        deadlines=DEADLINES,
    )


def draw_plan(random_: random.Random, config: ControlConfig) -> ChaosPlan:
    return ChaosPlan(
        instances=random_.randint(1, 5),
        slots=random_.choice((1, 1, 2, 3, int(config.max_staleness) + 1)),
        max_requests=config.group_size * random_.randint(1, 4),
        prompts=random_.randint(1, 40),
        faults=random_.randint(0, 12),
        one_batch=random_.random() < 0.3,
        shares_trainer=random_.random() < 0.2,
        tools=random_.random() < 0.3,
        kv_tokens=random_.choice((64, 128, 1 << 20)),
    )


def run_schedule(
    seed: int, mode: ModeName | None = None, kind: Callable[..., ChaosRuntime] = ChaosRuntime
) -> ChaosRuntime:
    """Run one schedule to its end; raises `BrokenPromiseError` if a promise is broken on the way."""
    random_ = random.Random(seed)
    config = draw_config(random_, mode)
    if seed % 2:
        config = config.model_copy(update={"admission": "just_in_time"})
    plan = draw_plan(random_, config)
    if seed % 3 == 0 and config.group_size > 1:
        config = config.model_copy(update={"dynamic_sampling": 1 + seed % 4})
        plan = dataclasses.replace(plan, no_signal=(0.3, 0.6, 1.0)[seed % 5 % 3])
    runtime = kind(config, plan, lambda below: int(random_.random() * below))
    runtime.run()
    return runtime
