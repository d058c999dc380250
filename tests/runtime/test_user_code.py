"""User code can fail only its own trajectory, and no process that it starts outlives its worker or the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.errors import RunError
from dora_rl.core.os_processes import descendants, end_descendants
from dora_rl.envs.config import EnvironmentConfig, RewardConfig
from dora_rl.envs.data import Problem
from dora_rl.ledger.ledger import connect
from dora_rl.runtime.run_dir import RunDir
from dora_rl.runtime.supervisor.reward_guard import PROMPTS, RewardGuard
from dora_rl.runtime.trial import Trial
from tests.runtime.checks import broken, leftovers, wait_for_events
from tests.runtime.host import Host, Supervisor, alive
from tests.runtime.making import PATIENCE, make_run, merged, settings

REWARDS = """
import os
import time

def exits_for_one(prompt, completion):
    if prompt.startswith("3*"):
        os._exit(1)
    return len(completion) % 2

def raises_for_half(prompt, completion):
    if int(prompt.partition("*")[0]) % 2:
        raise ValueError("odd")
    return len(completion) % 2

def raises_differently(prompt, completion):
    raise ValueError(f"cannot read {prompt} {completion}")

def leave(name):
    '''Start a process that leaves its session and loses its parent; it writes its pid and this name to a file.'''
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(FILE, "a") as file:
                file.write(f"{os.getpid()} {name}\\n")
            os.close(writer)
            os.execv("/bin/sleep", ["sleep", "3600"])
        os._exit(0)
    os.close(writer)
    os.read(reader, 1)

def leaves(prompt, completion):
    leave("after")
    return len(completion) % 2

def leaves_and_hangs(prompt, completion):
    if prompt.startswith("3*"):
        leave("hung")
        time.sleep(3600)
    return len(completion) % 2

def leaves_and_exits(prompt, completion):
    if prompt.startswith("3*"):
        leave("exited")
        os._exit(1)
    return len(completion) % 2

def forks_and_returns(prompt, completion):
    os.fork()
    return len(completion) % 2
"""


def begin(host: Host, base: Path, place: Path, function: str, **other: Any) -> Supervisor:
    """Start a run with one of the reward functions; it allows no restarts, except those that do not count."""
    (place / "rewards.py").write_text(f"FILE = {str(place / 'left')!r}\n{REWARDS}")
    reward = {"functions": [f"{place / 'rewards.py'}:{function}"], "workers": 1}
    changes = {"reward": reward, "supervision": {"restarts": 0}, "data": {"params": {"count": 16}}}
    tree = merged(merged(settings(base, steps=4, group_size=4, groups_per_step=4), changes), other)
    return host.start(make_run(base, f"user-code-{place.name}", tree))


def left(place: Path, name: str = "") -> set[int]:
    """Processes that reward functions started, by the name they were given."""
    try:
        lines = (place / "left").read_text().splitlines()
    except FileNotFoundError:
        return set()
    return {int(line.split()[0]) for line in lines if line.endswith(name)}


def eventually(check: Callable[[], object]) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.01)
    return False


def failures(folder: RunDir) -> set[tuple[str, str]]:
    """Failed trajectories: the key of the prompt without its epoch, and the reason."""
    query = 'SELECT t.failed, g.prompt FROM trajectories t JOIN groups g ON t."group" = g.id WHERE t.failed IS NOT NULL'
    with connect(folder.ledger) as connection:
        return {(prompt.partition("@")[0], why) for why, prompt in connection.execute(query)}


# -- failing requests ---------------------------------------------------------------------------------------------


def test_a_prompt_that_kills_its_worker_uses_no_restart_and_fails_no_other_prompt(
    host: Host, base: Path, tmp_path: Path
) -> None:
    run = begin(host, base, tmp_path, "exits_for_one")
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    failed = failures(run.folder)
    assert {why for _, why in failed} == {"the process died in which the reward ran"}
    assert len({prompt for prompt, _ in failed}) == 1
    deaths = [notice for notice in outcome["notices"] if "reward0" in notice and "is lost" in notice]
    assert len(deaths) > 1, "with no restarts allowed, the first death that counts would have ended the run"


def test_a_reward_worker_that_cannot_start_is_given_up(host: Host, base: Path, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    run = begin(host, base, tmp_path, "", reward={"functions": [f"{tmp_path / 'dies.py'}:reward"]})
    outcome = run.wait()
    assert outcome["code"] == 1
    assert "no reward worker is left: reward0 failed 1 times in a row" in outcome["error"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [("kills_always", "the process died in which the reward ran"), ("raises_always", "ValueError: never again")],
)
def test_a_reward_that_always_fails_ends_the_run_at_once(host: Host, base: Path, function: str, reason: str) -> None:
    changes = {"reward": {"functions": [f"task.py:{function}"]}, "supervision": {"restarts": 0, "backoff_seconds": 600}}
    run = host.start(make_run(base, f"user-code-{function}", merged(settings(base), changes)))
    outcome = run.wait()
    assert outcome["code"] == 1
    assert "no response could be scored" in outcome["error"]
    assert reason in outcome["error"]
    assert leftovers(run, outcome) == []


def test_rewards_that_fail_for_different_reasons_end_the_run_by_failed_groups(
    host: Host, base: Path, tmp_path: Path
) -> None:
    outcome = begin(host, base, tmp_path, "raises_differently").wait()
    assert outcome["code"] == 1
    assert "groups failed in a row" in outcome["error"]


def test_rewards_that_often_fail_do_not_end_the_run(host: Host, base: Path, tmp_path: Path) -> None:
    run = begin(host, base, tmp_path, "raises_for_half")
    assert broken(run, run.wait(), 4) == []


def send(guard: RewardGuard, prompts: int, each: int = 1, first: int = 0) -> list[int]:
    """Send requests for this many prompts, with `each` responses to a prompt; returns the request numbers."""
    items = list(range(first, first + prompts * each))
    for item in items:
        guard.asked(item, f"prompt {item // each}")
    return items


def test_the_run_ends_only_if_the_whole_sample_fails() -> None:
    guard = RewardGuard()
    items = send(guard, PROMPTS)
    for item in items[1:]:
        guard.answered(item, "no")  # a failure may return before a success
    with pytest.raises(RunError, match="all failed with the same reason: no; fix"):
        guard.answered(items[0], "no")


def test_one_success_ends_the_watch() -> None:
    for succeeded in range(PROMPTS):
        guard = RewardGuard()
        for item in send(guard, PROMPTS):
            guard.answered(item, None if item == succeeded else "no")
        for item in send(guard, 50, first=100):
            guard.answered(item, "no")


def test_a_success_outside_the_sample_ends_the_watch() -> None:
    guard = RewardGuard()
    items = send(guard, PROMPTS)
    (later,) = send(guard, 1, first=1000)
    guard.answered(later, None)
    for item in items:
        guard.answered(item, "no")


def test_many_responses_to_too_few_prompts_do_not_end_the_run() -> None:
    guard = RewardGuard()
    for item in send(guard, PROMPTS - 1, each=100):
        guard.answered(item, "no")


def test_a_sample_that_failed_for_different_reasons_does_not_end_the_run() -> None:
    guard = RewardGuard()
    for item in send(guard, PROMPTS):
        guard.answered(item, f"no {item}")


def test_requests_sent_before_the_first_timeout_do_not_count() -> None:
    guard = RewardGuard()
    for item in send(guard, PROMPTS):
        guard.answered(item, "late", late=True)
    items = send(guard, PROMPTS, first=100)
    for item in items[:-1]:
        guard.answered(item, "late", late=True)
    with pytest.raises(RunError, match="late"):
        guard.answered(items[-1], "late", late=True)


# -- processes that user code starts ------------------------------------------------------------------------------


def test_no_process_started_by_a_reward_outlives_the_run(host: Host, base: Path, tmp_path: Path) -> None:
    run = begin(host, base, tmp_path, "leaves")
    assert broken(run, run.wait(), 4) == []
    assert left(tmp_path)
    assert [pid for pid in left(tmp_path) if alive(pid)] == []


@pytest.mark.parametrize("place", [None, "fork_server", "reward0", "reaper-reward0"])
def test_no_process_started_by_a_reward_outlives_a_killed_ancestor(
    host: Host, base: Path, tmp_path: Path, place: str | None
) -> None:
    run = begin(host, base, tmp_path, "leaves", supervision={"restarts": 5}, control={"steps": 6})
    assert eventually(lambda: left(tmp_path))
    before = left(tmp_path)
    assert any(alive(pid) for pid in before), "a process that a reward uses may live as long as its worker"
    assert run.signal(signal.SIGKILL, place)
    assert eventually(lambda: not any(alive(pid) for pid in before))
    outcome = run.wait()
    assert eventually(lambda: not any(alive(pid) for pid in run.everybody() | left(tmp_path)))
    if place is not None:
        assert broken(run, outcome, 6) == []


def test_no_process_started_by_a_reward_outlives_the_trial_call(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(f"FILE = {str(tmp_path / 'left')!r}\n{REWARDS}")
    problem = Problem(key="", prompt="1*1=")
    Trial(
        RewardConfig(functions=["rewards.py:leaves"], timeout_seconds=PATIENCE), EnvironmentConfig(), tmp_path, problem
    ).finish()
    assert left(tmp_path)
    assert [pid for pid in left(tmp_path) if alive(pid)] == []


@pytest.mark.parametrize(("function", "name"), [("leaves_and_hangs", "hung"), ("leaves_and_exits", "exited")])
def test_processes_started_by_a_failed_request_end_with_its_worker(
    host: Host, base: Path, tmp_path: Path, function: str, name: str
) -> None:
    """They end before the run does. A child that holds the channel open does not hide the end of its parent."""
    other = {"reward": {"timeout_seconds": 1.0 if name == "hung" else 600.0}, "control": {"steps": 100}}
    run = begin(host, base, tmp_path, function, **other)
    assert eventually(lambda: left(tmp_path, name))
    (first, *_) = left(tmp_path, name)
    assert eventually(lambda: not alive(first))
    assert run.alive()
    assert wait_for_events(run, run.events() + 40)
    run.signal(signal.SIGKILL)
    run.wait()
    assert eventually(lambda: not any(alive(pid) for pid in run.everybody() | left(tmp_path)))


def test_a_process_that_a_reward_forks_is_no_second_worker(host: Host, base: Path, tmp_path: Path) -> None:
    run = begin(host, base, tmp_path, "forks_and_returns")
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    assert failures(run.folder) == set()
    assert outcome["notices"] == []


def test_descendants_are_found_and_ended_at_any_depth() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        for _ in range(3):
            if os.fork():
                time.sleep(3600)
            os.setsid()
        os.write(writer, b"x")
        time.sleep(3600)
    os.read(reader, 1)
    below = descendants(os.getpid())
    assert len(descendants(pid)) == 3
    assert descendants(pid) | {pid} <= below
    spared = below - descendants(pid) - {pid}  # other descendants of this process
    mine = descendants(pid) | {pid}
    assert eventually(lambda: end_descendants(0.0, spared) or not any(map(alive, mine)))
    for fd in (reader, writer):
        os.close(fd)
