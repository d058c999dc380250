"""The trajectory store keeps what may still be needed, and its counts miss nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.core.errors import RunError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.types import Prompt, SlotId
from dora_rl.orchestrator.config import ControlConfig
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.supervisor.failure_guard import FailureGuard
from dora_rl.runtime.supervisor.trajectory_store import TrajectoryEntry, TrajectoryStore
from dora_rl.runtime.workers.trainer import group

SLOT = SlotId("i0.1", 0)


class Numbers:
    """As many problems as anybody wants."""

    count = None

    def problem(self, number: int) -> tuple[str, Any]:
        return f"p{number}", {"prompt": str(number)}


def store(group_size: int = 1) -> TrajectoryStore:
    made = TrajectoryStore(Numbers(), lambda _: (1, 2), group_size)  # type: ignore[arg-type]
    made.apply(made.fetch(64), [], 0)
    return made


def start(made: TrajectoryStore, group: int, version: int) -> None:
    prompt = Prompt(key=f"p{group}", tokens=2)
    made.apply(e.Tick(), [c.StartGroup(group=group, prompt=prompt, version=version, slot=SLOT)], 0)


def generated(trajectory: int, version: int) -> e.Generated:
    return e.Generated(
        trajectory=trajectory, attempt=0, instance="i0.1", version=version, fingerprint="", tokens=3, kv_tokens=0
    )


def published(version: int) -> e.Published:
    return e.Published(version=version, attempt=1, fingerprint=f"f{version}")


def test_live_versions_are_the_most_since_the_last_publishing() -> None:
    made = store()
    made.apply(published(0), [], 0)
    start(made, 0, 0)
    made.apply(published(1), [], 0)
    assert made.live_versions == 1
    start(made, 1, 1)
    made.apply(generated(0, 0), [], 0)
    made.apply(generated(0, 0), [], 0)  # reported twice, counted once
    made.apply(generated(1, 1), [], 0)
    made.apply(published(2), [], 0)
    assert made.live_versions == 2, "two were live for a while, though none is now"
    made.apply(published(3), [], 0)
    assert made.live_versions == 0
    start(made, 2, 3)
    made.apply(e.Tick(), [c.FailTrajectory(trajectory=2, reason="why"), c.GroupFailed(group=2, reasons=("why",))], 0)
    start(made, 3, 3)
    made.apply(published(4), [], 0)
    assert made.live_versions == 1


def test_fingerprints_are_kept_as_long_as_a_group_may_need_them() -> None:
    made = store()
    for version in range(4):
        made.apply(published(version), [], 0)
        start(made, version, version)
    made.apply(e.Tick(), [c.Apply(step=3, attempt=1, groups=(0, 1))], 0)
    made.apply(e.Checkpointed(version=4), [], 0)
    assert sorted(made.fingerprints) == [2, 3]


def test_one_key_of_an_engine_leaves_the_others_as_they_were() -> None:
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"source": "d"},
        "reward": {"functions": ["exact"]},
        "control": {"groups_per_step": 1, "group_size": 1, "max_response_tokens": 8},
    }
    plain = build(RunConfig, tree).rollout.engine
    changed = build(RunConfig, tree | {"rollout": {"engine": {"max_requests": 3}}}).rollout.engine
    assert changed == plain.model_copy(update={"max_requests": 3})
    assert plain.kv_bytes == plain.host_bytes == 256 << 20


def test_experts_belong_to_the_tokens_that_the_policy_sampled() -> None:
    made = store()
    start(made, 0, 0)
    entry = made.trajectory(0)
    experts = np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2)
    turns = ((7, 8), experts[:2]), ((5, 5, 5), None), ((9,), experts[2:]), ((5,), None)
    for tokens, used in turns:
        logprobs = [-1.0] * len(tokens)
        end, sampled = entry.length, used is not None
        entry.append(TokenChunk.of(0, tokens, logprobs, version=0, start=end, sampled=sampled, experts=used))
    entry.reward = 1.0
    (trajectory,) = group(made.for_training(0)).trajectories
    assert trajectory.routed_experts is not None
    # The prompt has two tokens, and a token is sampled by the forward pass over the token before it.
    known = {1: experts[0], 2: experts[1], 6: experts[2]}
    for place, used in enumerate(trajectory.routed_experts):
        assert (used == known.get(place, np.full((2, 2), -1))).all()


@pytest.mark.parametrize("last", ["fails", "scored", "without signal"])
def test_failures_are_in_a_row_only_if_no_group_ends_well_between(last: str) -> None:
    made = store(group_size=2)
    control = ControlConfig(groups_per_step=1, group_size=2, max_staleness=0, max_response_tokens=1)
    failures = FailureGuard(control, made)

    def happens(event: e.Event, *commands: c.Command) -> None:
        made.apply(event, commands, 0)
        failures.apply(event, commands, 0)
        failures.check(0)

    def fails(number: int) -> None:
        start(made, number, 0)
        both = [c.FailTrajectory(trajectory=2 * number + sibling, reason="why") for sibling in range(2)]
        happens(e.Tick(), both[0])
        happens(e.Tick(), both[1], c.GroupFailed(group=number, reasons=("why", "why")))

    for number in range(16):
        fails(number)
    start(made, 16, 0)
    steps: list[tuple[Any, ...]] = [
        (e.Scored(trajectory=32, reward=1.0),),
        (e.Tick(), c.FailTrajectory(trajectory=33, reason="why")),
    ]
    if last == "without signal":
        steps[1] = (*steps[1], c.GroupWithoutSignal(group=16, reward=1.0))
    for step in reversed(steps) if last == "scored" else steps:
        happens(*step)
    assert made.without_signal == (last == "without signal")
    for number in range(17, 33):
        fails(number)
    with pytest.raises(RunError, match="17 groups failed in a row"):
        fails(33)


def test_the_current_turn_starts_after_the_last_observation() -> None:
    entry = TrajectoryEntry()
    assert entry.turn_start == 0
    for count, sampled, start in ((2, False, 2), (3, True, 2), (1, True, 2), (4, False, 10), (2, True, 10)):
        entry.append(TokenChunk.of(0, [3] * count, version=0, start=entry.length, sampled=sampled))
        assert entry.turn_start == start
