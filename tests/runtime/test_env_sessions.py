"""Multi-turn trajectories in a real run: their observations are recorded, not trained on, and not lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dora_rl.ledger.ledger import connect
from dora_rl.runtime.run_dir import RunDir
from tests.runtime.checks import broken, strike
from tests.runtime.host import Host
from tests.runtime.making import lines, make_run, merged, settings

TURNS = 3
ENVIRONMENT = """
import asyncio
import os
import time

class Counter:
    def reset(self, problem):
        self.turns = 0
        return "1+"

    def step(self, text):
        self.turns += 1
        time.sleep(0.003)
        if self.turns == 3:
            return None, 1.0, True
        return f"{self.turns}*", 0.25, False

class Together(Counter):
    inside = 0

    def __init__(self, file):
        self.file = file

    def step(self, text):
        Together.inside += 1
        with open(self.file, "a") as file:
            file.write(f"{Together.inside}\\n")
        time.sleep(0.02)
        Together.inside -= 1
        return super().step(text)

class Awaits(Together):
    async def step(self, text):
        Together.inside += 1
        with open(self.file, "a") as file:
            file.write(f"{Together.inside}\\n")
        await asyncio.sleep(0.02)
        Together.inside -= 1
        return Counter.step(self, text)

class Harms(Counter):
    def __init__(self, hang):
        self.hang = hang

    def reset(self, problem):
        self.harms = int(problem.key.partition("-")[0]) % 5 == 3
        return super().reset(problem)

    def step(self, text):
        if self.harms and self.hang:
            time.sleep(3600)
        elif self.harms:
            os._exit(1)
        time.sleep(0.05)
        return super().step(text)

class Silent(Counter):
    def step(self, text):
        return ("", 0.0, False) if self.turns else super().step(text)

class Talks(Counter):
    def step(self, text):
        return "1+2+3+4+5+6+7+8+9+" * 2, 0.25, False

class Fails(Counter):
    def step(self, text):
        if len(text) % 2:
            raise ValueError("odd")
        return super().step(text)
"""


def tree(base: Path, kind: str = "Counter", **control: Any) -> dict[str, Any]:
    (base / "environment.py").write_text(ENVIRONMENT)
    environment = {"environment": {"kind": f"environment.py:{kind}", "max_turns": TURNS}}
    rewards = {"reward": {"functions": [], "workers": 2}}
    return merged(merged(settings(base, steps=4, **control), environment), rewards)


def spans(folder: RunDir) -> dict[int, list[tuple[int, bytes]]]:
    """The token spans of each kept trajectory, in order: (whether the policy sampled them, tokens)."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    with connect(folder.ledger) as connection:
        query = "SELECT trajectory, sampled, tokens FROM tokens ORDER BY trajectory, start"
        for trajectory, sampled, tokens in connection.execute(query):
            row = found.setdefault(trajectory, [])
            if row and row[-1][0] == sampled:
                row[-1] = (sampled, row[-1][1] + tokens)
            else:
                row.append((sampled, tokens))
    return found


@pytest.mark.parametrize("place", [None, "reward0", "i0"])
def test_turns_are_complete_also_when_a_process_is_lost(host: Host, base: Path, place: str | None) -> None:
    changes = {"checkpoint": {"every": 50}, "rollout": {"instances": 3}}
    run = host.start(make_run(base, f"turns-{place}", merged(tree(base), changes)))
    if place is not None:
        strike(run, place, random.Random(1))
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    letters = {letter: token for token, letter in enumerate("0123456789*+=", start=2)}
    complete = 0
    for turns in spans(run.folder).values():
        observations = [memoryview(tokens).cast("i").tolist() for sampled, tokens in turns if not sampled]
        expected = [[letters["1"], letters["+"]], [letters["1"], letters["*"]], [letters["2"], letters["*"]]]
        assert observations == expected[: len(observations)]
        assert [sampled for sampled, _ in turns] == [0, 1, 0, 1, 0, 1][: len(turns)]
        complete += len(observations) == TURNS
    assert complete, "no trajectory had all its turns"
    with connect(run.folder.ledger) as connection:
        rewards = {reward for (reward,) in connection.execute("SELECT reward FROM trajectories WHERE failed IS NULL")}
    # Each turn adds its reward; a trajectory that reached the length limit has fewer turns.
    assert rewards <= {0.0, 0.25, 0.5, 1.5}


def test_an_environment_that_raises_fails_only_its_trajectory(host: Host, base: Path) -> None:
    run = host.start(make_run(base, "turns-fail", tree(base, "Fails", group_size=4)))
    outcome = run.wait()
    assert broken(run, outcome, 4) == []
    with connect(run.folder.ledger) as connection:
        reasons = [
            reason for (reason,) in connection.execute("SELECT failed FROM trajectories WHERE failed IS NOT NULL")
        ]
    assert reasons
    assert all("odd" in reason for reason in reasons)


def test_an_environment_without_an_observation_fails_only_its_trajectory(host: Host, base: Path) -> None:
    run = host.start(make_run(base, "turns-silent", tree(base, "Silent", group_size=4)))
    assert broken(run, run.wait(), 4) == []
    with connect(run.folder.ledger) as connection:
        reasons = {why for (why,) in connection.execute("SELECT failed FROM trajectories WHERE failed IS NOT NULL")}
    assert reasons == {"environment, step: it returned no observation, though it is not done"}


def test_an_observation_that_does_not_fit_the_context_ends_the_trajectory(host: Host, base: Path) -> None:
    more = {"rollout": {"engine": {"max_context": 64}}, "control": {"max_response_tokens": 200}}
    run = host.start(make_run(base, "turns-context", merged(tree(base, "Talks"), more)))
    assert broken(run, run.wait(), 4) == []
    with connect(run.folder.ledger) as connection:
        lengths = [tokens for (tokens,) in connection.execute("SELECT tokens FROM trajectories WHERE failed IS NULL")]
    assert lengths
    assert max(lengths) <= 64


@pytest.mark.parametrize(("kind", "concurrency"), [("Together", 1), ("Together", 4), ("Awaits", 4)])
def test_a_worker_steps_environments_up_to_its_concurrency_at_once(
    host: Host, base: Path, tmp_path: Path, kind: str, concurrency: int
) -> None:
    file = tmp_path / "inside"
    settings = {"environment": {"params": {"file": str(file)}, "concurrency": concurrency}, "reward": {"workers": 1}}
    run = host.start(make_run(base, f"turns-{kind}-{concurrency}", merged(tree(base, kind), settings)))
    assert broken(run, run.wait(), 4) == []
    most = max(int(line) for line in file.read_text().split())
    assert most == 1 if concurrency == 1 else 1 < most <= concurrency


@pytest.mark.parametrize("hang", [True, False])
def test_an_environment_that_hangs_or_crashes_fails_no_other_on_its_worker(host: Host, base: Path, hang: bool) -> None:
    environment = {"params": {"hang": hang}, "concurrency": 4, "timeout_seconds": 20.0 if hang else 600.0}
    settings = {"environment": environment, "reward": {"workers": 1}, "supervision": {"restarts": 0}}
    run = host.start(make_run(base, f"turns-harm-{hang}", merged(tree(base, "Harms"), settings)))
    assert broken(run, run.wait(), 4) == []
    query = 'SELECT t.failed, g.prompt FROM trajectories t JOIN groups g ON t."group" = g.id'
    with connect(run.folder.ledger) as connection:
        rows = connection.execute(query).fetchall()
    failed = [(why, prompt) for why, prompt in rows if why is not None]
    assert failed
    for why, prompt in failed:
        assert int(prompt.partition("-")[0]) % 5 == 3, why
        assert ("longer than" if hang else "died") in why


def test_held_out_prompts_are_evaluated_in_the_environment(host: Host, base: Path) -> None:
    """There are more prompts than the evaluator's engine can hold at once."""
    changes = {
        "data": {"held_out": 6},
        "evaluation": {"every": 2, "success_threshold": 1.5},
        "rollout": {"engine": {"max_requests": 4, "max_context": 200}},
        "control": {"max_response_tokens": 150},
    }
    run = host.start(make_run(base, "turns-evaluation", merged(tree(base), changes)))
    assert broken(run, run.wait(), 4) == []
    found = [line for line in lines(run.folder.metrics) if "evaluation" in line]
    assert [line["evaluation"] for line in found] == [0, 2, 4]
    for line in found:
        assert line["eval/held_out/failed"] == 0
        assert 0 < line["eval/held_out/reward"] <= 1.5
        assert line["eval/held_out/response_length"] > 2, "the first observation counts"
    assert any(line["eval/held_out/accuracy"] > 0 for line in found), "no trajectory had all its turns"


def test_an_environment_that_crashes_fails_only_its_held_out_prompt(host: Host, base: Path) -> None:
    settings = {"environment": {"params": {"hang": False}, "concurrency": 4}, "supervision": {"restarts": 0}}
    evaluation = {"data": {"held_out": 10}, "evaluation": {"every": 4}}
    run = host.start(make_run(base, "turns-evaluation-harm", merged(merged(tree(base, "Harms"), settings), evaluation)))
    assert broken(run, run.wait(), 4) == []
    found = [line for line in lines(run.folder.metrics) if "evaluation" in line]
    assert found
    assert all(line["eval/held_out/failed"] == 2 for line in found)
