"""The orchestrator's time for an event with 64 and with 4,096 instances, and the simulator's speed.

Both fleets have the same load per instance and run alternately in one process. Only the time inside
`Orchestrator.step` counts, including rebalancing.
"""

from __future__ import annotations

import statistics
import time

from rich.console import Console

from benchmarks.report import at_least, at_most, publish
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.presets import preset
from dora_rl.sim.run import control_for, parse_variant, simulate
from dora_rl.sim.runtime import SimRuntime

FLEETS = (64, 4096)
EVENTS = 60_000
REPEATS = 3
console = Console()


def event_microseconds(instances: int, *, requests: int = 16, staleness: int = 3, events: int = EVENTS) -> float:
    """Mean time of `Orchestrator.step` over many events of a steady run; B grows with instances and requests."""
    config = preset(
        "laptop",
        [
            f"devices={2 * instances}",
            f"trainer_devices={instances}",
            f"control.groups_per_step={max(1, instances * requests // 64)}",
            f"control.max_staleness={staleness}",
            f"rollout.max_requests={requests}",
            "steps=100000",
        ],
    )
    control = control_for(config, parse_variant("dora"))
    runtime = SimRuntime(config.model_copy(update={"control": control}), "disaggregated")
    orchestrator = Orchestrator(control)
    warm = 2 * len(runtime.instances) + 2000
    spent = 0.0
    for number in range(warm + events):
        arrived = runtime.next_event(orchestrator.wake_at())
        assert arrived is not None
        before = time.perf_counter()
        commands = orchestrator.step(*arrived)
        if number >= warm:
            spent += time.perf_counter() - before
        runtime.execute(commands)
    return spent / events * 1e6


def main() -> None:
    costs: dict[int, list[float]] = {instances: [] for instances in FLEETS}
    for repeat in range(REPEATS):
        for instances in FLEETS:
            costs[instances].append(event_microseconds(instances))
            console.print(f"  repeat {repeat + 1}: {instances} instances, {costs[instances][-1]:.1f} us per event")
    ratios = [large / small for small, large in zip(costs[64], costs[4096], strict=True)]

    console.print("  longcat-4096: ten steps")
    began = time.perf_counter()
    result = simulate(preset("longcat-4096", ["steps=6", "warmup_steps=4"]), parse_variant("dora"))
    seconds = time.perf_counter() - began

    console.print("  longcat-4096: the headline")
    config = preset("longcat-4096")
    dora, sync = (simulate(config, parse_variant(mode)) for mode in ("dora", "sync"))
    publish(
        "control",
        [
            at_most("cost of an event, 4,096 over 64 instances", 2.0, statistics.median(ratios)),
            at_most("seconds to simulate ten steps of longcat-4096 ('about a minute')", 75.0, seconds),
            at_least(
                "longcat-4096: dora over sync, trained tokens/s", 2.0, dora.tokens_per_second / sync.tokens_per_second
            ),
            at_least("longcat-4096: occupancy", 0.9, dora.occupancy),
            at_most("longcat-4096: step time over the lower bound", 1.15, dora.over_lower_bound),
        ],
        {
            "event_microseconds": {str(instances): values for instances, values in costs.items()},
            "ratios": ratios,
            "longcat_seconds": seconds,
            "longcat_events": result.events,
            "longcat_step_minutes": {"dora": dora.step_seconds / 60, "sync": sync.step_seconds / 60},
            "longcat_staleness": dora.staleness,
            "longcat_max_staleness": config.control.max_staleness,
        },
    )


if __name__ == "__main__":
    main()
