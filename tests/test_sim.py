"""The simulator is deterministic, follows its cost model, and runs the production orchestrator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dora_rl.core.commands import LoadVersion, Move, Resume, StartGroup
from dora_rl.core.types import SlotId
from dora_rl.orchestrator.modes import MODES
from dora_rl.orchestrator.orchestrator import Orchestrator
from dora_rl.sim.config import Workload
from dora_rl.sim.costs import Costs
from dora_rl.sim.invariants import InvariantChecker
from dora_rl.sim.lower_bound import lower_bound
from dora_rl.sim.plan import candidates, plan
from dora_rl.sim.presets import PRESETS, preset
from dora_rl.sim.run import control_for, parse_variant, simulate
from dora_rl.sim.runtime import SimRuntime
from dora_rl.sim.workload import Source

SMALL = ["steps=4", "warmup_steps=3"]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_result(mode: str) -> None:
    results = [simulate(preset("laptop", SMALL), parse_variant(mode)) for _ in range(2)]
    assert results[0] == results[1]
    other = simulate(preset("laptop", [*SMALL, "seed=1"]), parse_variant(mode))
    assert other.step_seconds != results[0].step_seconds


@pytest.mark.parametrize("text", [*MODES, "dora:proportional", "dora:elastic", "dora:k0", "dora:k7"])
@pytest.mark.parametrize("turns", [1, 3])
def test_the_promises_hold_in_simulation(text: str, turns: int) -> None:
    settings = [
        "steps=5",
        "warmup_steps=1",
        f"workload.turns={turns}",
        "workload.tool_seconds=0.2",
        "workload.reward_seconds=0.05",
    ]
    config = preset("laptop", settings)
    variant = parse_variant(text)
    control = control_for(config, variant)
    runtime = SimRuntime(
        config.model_copy(update={"control": control}), "elastic" if variant.elastic else "disaggregated"
    )
    orchestrator, checker = Orchestrator(control), InvariantChecker(control)
    while (arrived := runtime.next_event(orchestrator.wake_at())) is not None:
        event, now = arrived
        commands = orchestrator.step(event, now)
        checker.observe(event, commands)
        checker.check_idle_slots(orchestrator.snapshot())
        runtime.execute(commands)
    assert len(checker.batches) >= 6


@pytest.mark.parametrize("seed", [0, 6])
def test_no_empty_slot_goes_back_and_forth_between_versions(seed: int) -> None:
    """With few slots and long tails, old versions often have targets above what their last requests can use."""
    settings = ["devices=6", "trainer_devices=2", "workload.sigma=1.3", "control.max_response_tokens=1024", "steps=10"]
    config = preset("laptop", [*settings, f"seed={seed}"])
    runtime, orchestrator = SimRuntime(config, "disaggregated"), Orchestrator(config.control)
    loads: dict[SlotId, list[int]] = {}
    """The versions that each slot has loaded since it last got a request."""
    most = 0
    while (arrived := runtime.next_event(orchestrator.wake_at())) is not None:
        commands = orchestrator.step(*arrived)
        for command in commands:
            if isinstance(command, LoadVersion):
                since = loads.setdefault(command.slot, [])
                since.append(command.version)
                most = max(most, len(since))
                assert since[-3:-2] != since[-1:], f"slot {command.slot} loads {since[-3:]}"
            elif isinstance(command, StartGroup | Resume):
                loads.pop(command.slot, None)
            elif isinstance(command, Move):
                loads.pop(command.target, None)
        runtime.execute(commands)
    assert most >= 2


def test_staleness_zero_trains_the_batches_of_sync() -> None:
    batches = []
    for text in ("sync", "dora:k0"):
        config = preset("laptop", SMALL)
        control = control_for(config, parse_variant(text))
        runtime = SimRuntime(config.model_copy(update={"control": control}), "disaggregated")
        orchestrator, checker = Orchestrator(control), InvariantChecker(control)
        while (arrived := runtime.next_event(orchestrator.wake_at())) is not None:
            commands = orchestrator.step(*arrived)
            checker.observe(arrived[0], commands)
            runtime.execute(commands)
        batches.append(checker.batches)
    assert batches[0] == batches[1]


@pytest.mark.parametrize("mode", ["sync", "dora", "dora:elastic", "partial"])
def test_nothing_beats_the_lower_bound(mode: str) -> None:
    assert simulate(preset("laptop", ["steps=12"]), parse_variant(mode)).over_lower_bound > 0.98


def test_a_single_request_takes_the_time_of_the_cost_model() -> None:
    """A single response of n tokens takes n base steps, plus the reading of its growing KV."""
    settings = [
        "control.groups_per_step=1",
        "control.group_size=1",
        "steps=1",
        "warmup_steps=0",
        "devices=2",
        "trainer_devices=1",
        "workload.sigma=0.0",
        "workload.mean_tokens=100",
        "rollout.load_overhead=0.0",
    ]
    config = preset("laptop", settings)
    costs = Costs(config)
    n, prompt = 100, config.workload.prompt_tokens
    decode = n * costs.step_base(1) + costs.per_token * (n * prompt + n * n / 2)
    trained = costs.train(n + prompt, 1) + config.trainer.fixed_seconds + config.trainer.publish_seconds
    expected = decode + costs.prefill(prompt) + costs.load() + trained
    result = simulate(config, parse_variant("dora:k0"))
    assert result.step_seconds == pytest.approx(expected, rel=1e-6)


def test_the_fullest_lock_step_rank_determines_the_step_time() -> None:
    config = preset("longcat-4096")
    costs = Costs(config)
    assert costs.ranks == 32
    # A context token on one rank costs 32 times as much as one that is divided over all ranks.
    assert costs.decode().per_token * 32 == pytest.approx(costs.per_token)
    # Fewer tokens are routed to fewer experts, so small batches read less.
    assert costs.step_base(1) < costs.step_base(512)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_feasible(name: str) -> None:
    config = preset(name)
    assert Costs(config).kv_tokens > config.control.max_response_tokens
    bound = lower_bound(config, "disaggregated", staleness=3, tokens=1e6, longest=1e4)
    assert bound.seconds > 0


def test_lengths_have_the_configured_mean_and_tail() -> None:
    workload = Workload(mean_tokens=2400.0, sigma=1.0, group_correlation=0.5)
    lengths = Source(workload, 16, 30_000, seed=0).sample(2048)
    assert lengths.mean() == pytest.approx(2400, rel=0.05)
    assert lengths.max() <= 30_000
    assert np.percentile(lengths, 99) / np.median(lengths) > 8
    logs = np.log(lengths)
    assert logs.mean(axis=1).var() / logs.var() == pytest.approx(0.5, abs=0.08)


def test_a_trace_keeps_siblings_together(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        f'{{"response_tokens": {100 * g + s}, "prompt_tokens": {g}, "group": {g}}}'
        for g in range(1, 5)
        for s in range(4)
    ]
    trace.write_text("\n".join(rows) + "\n")
    source = Source(Workload(trace=trace), 4, 1000, seed=0)
    for prompt in range(8):
        group = source.prompt_tokens(prompt)
        siblings = sorted(source.response_tokens(prompt, sibling) for sibling in range(4))
        assert siblings == [100 * group + s for s in range(4)]


def test_more_staleness_is_not_slower() -> None:
    times = [simulate(preset("laptop", ["steps=16"]), parse_variant(f"dora:k{k}")).tokens_per_second for k in (0, 1, 4)]
    assert times[0] < times[1] <= times[2] * 1.02


def test_plan_skips_only_candidates_that_cannot_win(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = '{{"response_tokens": {}, "prompt_tokens": 16}}'
    trace.write_text("\n".join(row.format(20 + 7 * i % 200) for i in range(200)))
    config = preset("laptop", ["steps=10", "warmup_steps=2", f"workload.trace={trace}"])
    ranking, skipped = plan(config, most=40)
    assert skipped > 0
    best = ranking[0]
    assert best.step_seconds == min(planned.step_seconds for planned in ranking)
    assert best.candidate.bound.seconds <= best.step_seconds * 1.02


def test_plan_varies_slots_and_skips_what_does_not_fit() -> None:
    assert {candidate.slots for candidate in candidates(preset("laptop"))} == {1, 2}
    # Two sets of weights of a 32B model leave no room for KV on two devices of 60 GB, but four devices have it.
    small = candidates(preset("paper-64", ["hardware.memory_bytes=60e9"]))
    assert {(it.config.rollout.devices, it.slots) for it in small} == {(2, 1), (4, 1), (4, 2)}


def test_elastic_layouts_generate_on_the_trainers_devices() -> None:
    result = simulate(preset("laptop", ["steps=8"]), parse_variant("dora:elastic"))
    assert result.labels["train"] > 0.05


def test_swapped_requests_are_swapped_in_again() -> None:
    """With a small KV cache, requests are swapped to host memory, and all are trained in the end."""
    result = simulate(
        preset(
            "laptop", [*SMALL, "hardware.memory_bytes=4e7", "control.kv_headroom=0.0", "control.kv_reserve_tokens=0"]
        ),
        parse_variant("dora"),
    )
    assert result.swaps > 0
    assert result.steps == 4
