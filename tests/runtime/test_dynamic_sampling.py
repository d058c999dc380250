"""Dynamic sampling in real runs: every third prompt is solved by any response, so its groups have no signal."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from dora_rl.apps.audit import audited
from dora_rl.apps.summary import summarise
from dora_rl.apps.summary_table import rows
from dora_rl.core import commands as c
from dora_rl.core import events as e
from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.core.types import Prompt, SlotId
from dora_rl.ledger.auditor import Auditor, Terms
from dora_rl.ledger.writer import LoggedEvent
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, final_weights, strike, wait_for
from tests.runtime.host import Host, Supervisor
from tests.runtime.making import lines, make_run, merged, settings

STEPS, CAP = 4, 10
SOLVED = {"reward": {"functions": ["task.py:solved_thirds"]}, "control": {"dynamic_sampling": CAP}}


def begin(host: Host, base: Path, name: str, mode: str = "dora", **control: Any) -> Supervisor:
    tree = merged(merged(settings(base, mode, steps=STEPS), SOLVED), {"control": control})
    return host.start(make_run(base, name, tree))


def finish(run: Supervisor) -> RunDir:
    assert broken(run, run.wait(), STEPS) == []
    return run.folder


def query(folder: RunDir, text: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder.ledger)) as connection:
        return connection.execute(text).fetchall()


def without_signal(folder: RunDir) -> int:
    return len(query(folder, "SELECT 1 FROM groups WHERE no_signal IS NOT NULL"))


def check_groups(folder: RunDir) -> None:
    """Groups without signal are exactly those of solved prompts; they are counted, not trained, and need no tokens."""
    groups = query(folder, "SELECT id, prompt, step, failure, no_signal FROM groups")
    rewards: dict[int, set[float]] = {}
    for group, reward in query(folder, 'SELECT "group", reward FROM trajectories'):
        rewards.setdefault(group, set()).add(reward)
    for group, prompt, step, failure, no_signal in groups:
        assert failure is None, "a group without signal has not failed"
        assert (no_signal is None) == (step is not None), (group, prompt)
        assert (len(rewards[group]) == 1) == (no_signal is not None), (group, prompt)
    trained = [group for group, _, step, _, _ in groups if step is not None]
    replaced = {group for group, *_, no_signal in groups if no_signal is not None}
    assert len(trained) == STEPS * 2
    assert replaced, "no prompt of this run was a solved one"
    tokens = {
        trajectory // 2
        for (trajectory,) in query(folder, "SELECT trajectory FROM tokens UNION ALL SELECT trajectory FROM ended")
    }
    assert not tokens & replaced
    assert lines(folder.metrics)[-1]["rollout/groups_without_signal"] == len(replaced)
    figures = {figure.name: figure.value for figure in audited(folder).figures}
    assert (figures["  without signal"], figures["  failed"]) == (str(len(replaced)), "0")


@pytest.fixture(scope="module")
def synchronous(host: Host, base: Path) -> RunDir:
    return finish(begin(host, base, "dynamic-sync", "sync"))


@pytest.mark.parametrize("mode", ["dora", "partial", "one_step_off"])
def test_groups_of_solved_prompts_are_replaced_and_counted(host: Host, base: Path, mode: str) -> None:
    check_groups(finish(begin(host, base, f"dynamic-{mode}", mode)))


def test_the_summary_names_groups_without_signal(synchronous: RunDir) -> None:
    check_groups(synchronous)
    count = without_signal(synchronous)
    summary = summarise(synchronous)
    assert summary.without_signal == {1.0: count}
    text = dict(rows(summary))["groups without signal"]
    assert text == f"{count} of {count + 2 * STEPS} were replaced (reward 1: {count})"
    wasted = structs.replace(summary, groups=9, without_signal={1.0: 4, 0.0: 1})
    hint = "MOST OF THE GENERATION TRAINED NOTHING, choose prompts whose rewards are not always 1"
    assert dict(rows(wasted))["groups without signal"] == f"5 of 9 were replaced (reward 1: 4; reward 0: 1): {hint}"
    assert "groups without signal" not in dict(rows(structs.replace(summary, without_signal={})))


def test_a_run_that_ends_with_its_prompts_is_finished(host: Host, base: Path) -> None:
    """Nothing replaces the last groups without signal, so the last step is short, or there is none for them."""
    tree = merged(merged(settings(base, steps=None), SOLVED), {"data": {"limit": 7, "epochs": 1}})
    run = host.start(make_run(base, "dynamic-ends", tree))
    assert run.wait()["code"] == 0
    assert audited(run.folder).problems == []
    summary = summarise(run.folder)
    assert (summary.state, summary.groups) == ("finished", 7)
    assert sum(summary.without_signal.values()) + sum(summary.staleness.values()) == 7


def test_the_count_and_the_weights_are_the_same_after_a_crash(host: Host, base: Path, synchronous: RunDir) -> None:
    run = begin(host, base, "dynamic-killed", "sync")
    assert wait_for(run, lambda: run.events() > 0 and without_signal(run.folder) > 0)
    assert strike(run, None, random.Random(1), most=10)
    run.wait()
    folder = finish(host.start(run.folder))
    check_groups(folder)
    assert same(folder, synchronous)


def test_no_staleness_is_synchronous_training(host: Host, base: Path, synchronous: RunDir) -> None:
    folder = finish(begin(host, base, "dynamic-dora-0", max_staleness=0))
    check_groups(folder)
    assert same(folder, synchronous)


def same(ours: RunDir, theirs: RunDir) -> bool:
    """Both runs have trained and replaced the same prompts, and have the same weights."""
    groups = "SELECT id, prompt, step, no_signal FROM groups ORDER BY id"
    a, b = final_weights(ours), final_weights(theirs)
    return query(ours, groups) == query(theirs, groups) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("algorithm", "refused"), [("reinforce_pp", True), ("reinforce_pp_baseline", False)])
def test_an_algorithm_that_learns_from_equal_rewards_is_refused(base: Path, algorithm: str, refused: bool) -> None:
    tree = merged(merged(settings(base), SOLVED), {"trainer": {"algorithm": {"name": algorithm}}})
    if refused:
        with pytest.raises(ConfigError, match="must be 0 with the algorithm 'reinforce_pp'"):
            build(RunConfig, tree)
    else:
        build(RunConfig, tree)


# -- the auditor ---------------------------------------------------------------------------------------------------


def problems(
    rewards: tuple[float, float],
    ends: float | None,
    trained: bool,
    *,
    groups: int = 1,
    cap: int = 1,
    fails: bool = False,
) -> list[str]:
    """What the auditor reports about the last of `groups` groups of version 0, with B = 1."""
    slot = SlotId("i0.1", 0)
    prompts = tuple(Prompt(key=str(number), tokens=1) for number in range(groups))
    last = groups - 1
    started: list[c.Command] = [
        c.StartGroup(group=number, prompt=prompt, version=0, slot=slot) for number, prompt in enumerate(prompts)
    ]
    log: list[tuple[e.Event, list[c.Command]]] = [
        (e.PromptsArrived(prompts=prompts), [c.Publish(version=0, attempt=1)]),
        (e.Published(version=0, attempt=1, fingerprint="f"), started),
    ]
    for sibling, reward in enumerate(rewards):
        trajectory = 2 * last + sibling
        served = e.Generated(
            trajectory=trajectory, attempt=0, instance="i0.1", version=0, fingerprint="f", tokens=1, kv_tokens=0
        )
        log += [(served, []), (e.Scored(trajectory=trajectory, reward=reward), [])]
    if fails:
        log[-1][1].append(c.GroupFailed(group=last, reasons=("why",)))
    if ends is not None:
        log[-1][1].append(c.GroupWithoutSignal(group=last, reward=ends))
    if trained:
        log.append((e.Tick(), [c.Apply(step=0, attempt=1, groups=(last,))]))
    auditor = Auditor(Terms(1, 2, 3, False, None, cap))
    for seq, (event, commands) in enumerate(log, 1):
        auditor.observe(LoggedEvent(seq, seq, event, commands))
    if not auditor.problems and not trained and ends is not None:
        assert auditor.outcome(last) == "without signal"
    return auditor.problems


def test_the_auditor_accepts_what_is_right() -> None:
    assert problems((1.0, 1.0), 1.0, trained=False) == []
    assert problems((0.0, 1.0), None, trained=True) == []
    assert problems((1.0, 1.0), None, trained=True, cap=0) == []
    assert problems((1.0, 1.0), None, trained=True, groups=2) == [], "the second one is beyond the cap"
    assert problems((1.0, 1.0), 1.0, trained=False, groups=2, cap=2) == []


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ({"rewards": (0.0, 1.0), "ends": 0.0, "trained": False}, "its rewards are not all 0"),
        ({"rewards": (1.0, 1.0), "ends": 0.0, "trained": False}, "its rewards are not all 0"),
        ({"rewards": (1.0, 1.0), "ends": 1.0, "trained": True}, "ended without signal and is trained"),
        ({"rewards": (1.0, 1.0), "ends": None, "trained": True}, "should have been replaced"),
        ({"rewards": (1.0, 1.0), "ends": 1.0, "trained": False, "cap": 0}, "the settings say that it is trained"),
        ({"rewards": (1.0, 1.0), "ends": 1.0, "trained": False, "groups": 2}, "the settings say that it is trained"),
        ({"rewards": (1.0, 1.0), "ends": 1.0, "trained": False, "fails": True}, "has failed or is trained"),
    ],
)
def test_the_auditor_names_what_is_wrong(log: dict[str, Any], problem: str) -> None:
    assert any(problem in one for one in problems(**log))
