"""Settings of the simulator: another value gives another prediction."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.config import build
from dora_rl.sim.config import SimConfig
from dora_rl.sim.presets import preset
from dora_rl.sim.run import parse_variant, simulate
from tests.runtime.making import merged
from tests.settings.workers import at

SHORT = ["steps=3", "warmup_steps=1", "control.groups_per_step=4", "control.group_size=4"]
TIGHT = at("model.kv_bytes_per_token", 2e5)
"""So large that the cache is what binds."""
TURNS = {"workload": {"turns": 3, "tool_seconds": 0.2, "tool_tokens": 30}}
MIXTURE = {
    "model": {"active_parameters": 1e8, "shared_parameters": 5e7, "experts": 64, "experts_per_token": 2},
    "rollout": {"lock_step": True},
}

EAGER = {"control": {"admission": "eager"}}
"""More groups than the trainer wants, so that requests have to move."""
LARGE = {"control": preset("laptop").control.model_dump(include={"groups_per_step", "group_size"})}

CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    # key, how the value is changed, and what else is set on both sides
    ("devices", lambda value: 2 * value, {}),
    ("steps", lambda value: value + 1, {}),
    ("warmup_steps", lambda value: value + 1, {}),
    ("seed", lambda value: value + 1, {}),
    ("hardware.flops", lambda value: value / 4, {}),
    ("hardware.memory_bytes", lambda value: value / 4, TIGHT),
    ("hardware.memory_bandwidth", lambda value: value / 4, {}),
    ("hardware.link_bandwidth", lambda value: value / 1000, {}),
    ("hardware.host_bandwidth", lambda value: value / 1000, {"layouts": {"dora": "colocated"}}),
    ("model.parameters", lambda value: 2 * value, {}),
    ("model.active_parameters", lambda value: 2 * value, MIXTURE),
    ("model.shared_parameters", lambda value: value / 2, MIXTURE),
    ("model.experts", lambda value: 4 * value, MIXTURE),
    ("model.experts_per_token", lambda value: 2 * value, MIXTURE),
    ("model.bytes_per_parameter", lambda value: 2 * value, {}),
    ("model.kv_bytes_per_token", lambda value: 4 * value, {}),
    ("rollout.devices", lambda value: 2 * value, {"devices": 16}),
    ("rollout.lock_step", lambda value: not value, {"devices": 16, "rollout": {"devices": 2}}),
    ("rollout.slots", lambda value: value + 1, {}),
    ("rollout.max_requests", lambda value: value // 2, {}),
    ("rollout.memory_share", lambda value: value / 2, TIGHT),
    ("rollout.bandwidth_efficiency", lambda value: value / 2, {}),
    ("rollout.compute_efficiency", lambda value: value / 8, {}),
    ("rollout.step_overhead", lambda value: 2 * value + 0.01, {}),
    ("rollout.load_overhead", lambda value: value + 3, {}),
    ("rollout.move_overhead", lambda value: value + 2, EAGER),
    ("trainer.utilisation", lambda value: value / 2, {}),
    ("trainer.passes", lambda value: value + 2, {}),
    ("trainer.fixed_seconds", lambda value: value + 1, {}),
    ("trainer.publish_seconds", lambda value: value + 1, {}),
    ("workload.prompt_tokens", lambda value: 4 * value, {}),
    ("workload.mean_tokens", lambda value: value / 2, {}),
    ("workload.sigma", lambda value: value / 2, {}),
    ("workload.group_correlation", lambda _: 0.9, {}),
    ("workload.turns", lambda value: value + 1, TURNS),
    ("workload.tool_seconds", lambda value: value + 1, TURNS),
    ("workload.tool_tokens", lambda value: 10 * value, TURNS),
    ("workload.reward_seconds", lambda value: value + 5, {}),
    ("workload.no_signal", lambda _: 0.5, {"control": {"dynamic_sampling": 2}}),
    ("control.dynamic_sampling", lambda _: 2, {"workload": {"no_signal": 0.5}}),
    ("layouts", lambda _: {"dora": "elastic"}, {"layouts": {"dora": "disaggregated"}}),
    ("trainer_devices", lambda value: value + 1, {"devices": 8, "trainer_devices": 3}),
    (
        "elastic_trainer_devices",
        lambda value: value + 2,
        {"devices": 8, "layouts": {"dora": "elastic"}, "elastic_trainer_devices": 2},
    ),
    ("control.placement", lambda _: "proportional", merged(LARGE, EAGER)),
    ("control.rebalance_seconds", lambda _: 0.5, {}),
    ("control.admission", lambda _: "eager", {"trainer": {"utilisation": 0.1}}),
]


def predicted(tree: dict[str, Any]) -> Any:
    """The figures of mode `dora`."""
    return _predicted(json.dumps(tree, sort_keys=True))


@functools.cache
def _predicted(tree: str) -> Any:
    return simulate(build(SimConfig, json.loads(tree)), parse_variant("dora"))


def value_at(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(("key", "change", "beside"), CHANGES, ids=[key for key, _, _ in CHANGES])
def test_every_setting_changes_what_is_predicted(key: str, change: Any, beside: dict[str, Any]) -> None:
    tree = merged(json.loads(preset("laptop", SHORT).model_dump_json()), beside)
    other = merged(tree, at(key, change(value_at(tree, key))))
    assert tree != other
    assert predicted(other) != predicted(tree)


def test_a_trace_is_drawn_from(tmp_path: Path) -> None:
    """`workload.trace`: all trajectories have the lengths of the file."""
    tree = json.loads(preset("laptop", SHORT).model_dump_json())
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"prompt_tokens": 9, "response_tokens": 50}) for _ in range(20)))
    assert predicted(merged(tree, at("workload.trace", str(trace)))) != predicted(tree)
