"""Rewards that wait are waited for together, and one that does harm harms no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.envs.config import RewardConfig
from dora_rl.ledger.ledger import connect
from tests.runtime.checks import broken
from tests.runtime.host import Host
from tests.runtime.making import make_run, merged, settings

REWARDS = """
import asyncio
import os
import time

inside = 0

def note(change):
    global inside
    inside += change
    with open(FILE, "a") as file:
        file.write(f"{inside}\\n")

def waits(prompt, completion):
    note(1)
    time.sleep(0.02)
    note(-1)
    return len(completion) % 2

async def awaits(prompt, completion):
    note(1)
    await asyncio.sleep(0.02)
    note(-1)
    return len(completion) % 2

def harms(prompt, completion):
    if int(prompt.partition("*")[0]) % 5 == 3:
        os._exit(1)
    time.sleep(0.01)
    return len(completion) % 2
"""


def rewards(folder: Path) -> Path:
    (folder / "rewards.py").write_text(f"FILE = {str(folder / 'inside')!r}\n{REWARDS}")
    return folder / "rewards.py"


@pytest.mark.parametrize(("function", "concurrency"), [("waits", 1), ("waits", 4), ("awaits", 4)])
def test_a_worker_judges_as_many_at_once_as_it_may(
    host: Host, base: Path, tmp_path: Path, function: str, concurrency: int
) -> None:
    changes = {"reward": {"functions": [f"{rewards(tmp_path)}:{function}"], "concurrency": concurrency}}
    run = host.start(make_run(base, f"slow-{function}-{concurrency}", merged(settings(base, group_size=4), changes)))
    assert broken(run, run.wait(), 4) == []
    most = max(int(line) for line in (tmp_path / "inside").read_text().split())
    assert most == 1 if concurrency == 1 else 1 < most <= concurrency


def test_a_reward_that_takes_its_process_down_costs_its_own_trajectory(host: Host, base: Path, tmp_path: Path) -> None:
    changes = {
        "reward": {"functions": [f"{rewards(tmp_path)}:harms"], "concurrency": 4},
        "supervision": {"restarts": 0},
    }
    run = host.start(make_run(base, "slow-harms", merged(settings(base), changes)))
    assert broken(run, run.wait(), 4) == []
    query = 'SELECT t.failed, g.prompt FROM trajectories t JOIN groups g ON t."group" = g.id'
    with connect(run.folder.ledger) as connection:
        failed = [(why, prompt) for why, prompt in connection.execute(query) if why is not None]
    assert failed
    assert all("died" in why for why, _ in failed)
    assert len({prompt for _, prompt in failed}) <= 3, "only problems 3, 8 and so on do harm"


def test_what_uses_signals_is_not_run_in_threads() -> None:
    with pytest.raises(ConfigError, match="concurrency must be 1 with the function 'math'"):
        build(RewardConfig, {"functions": ["math"], "concurrency": 2})
