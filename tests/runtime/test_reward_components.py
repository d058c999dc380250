"""The components of the reward are logged with each step, also after a restart."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import pytest

from dora_rl.envs.config import RewardConfig
from dora_rl.envs.data import Problem
from dora_rl.envs.rewards import RewardScorer
from dora_rl.runtime.supervisor.metrics import reward_metrics
from tests.runtime.checks import broken, wait_for_events
from tests.runtime.host import Host
from tests.runtime.making import lines, make_run, merged, settings

REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) % 2, "length in letters": len(solution_str), "note": "a text"}

def other(prompt, completion):
    return 0.5
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_components_of_the_reward_are_in_metrics_and_samples(
    host: Host, base: Path, tmp_path: Path, interrupted: bool
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    functions = [f"{file}:compute_score", f"{file}:other", "format:^1 *$"]
    changes = {"reward": {"functions": functions, "weights": [1.0, 2.0, 0.0]}, "logging": {"samples": 2}}
    run = host.start(make_run(base, f"components-{interrupted}", merged(settings(base, steps=6), changes)))
    if interrupted:
        assert wait_for_events(run, 30)
        run.signal(signal.SIGKILL)
        run.wait()
        run = host.start(run.folder)
    assert broken(run, run.wait(), 6) == []
    samples = lines(run.folder.samples)
    steps = {line["step"]: line for line in lines(run.folder.metrics) if "step" in line}
    assert sorted(steps) == list(range(6))
    for step, figures in steps.items():
        # Both groups of a step are sampled, so the metrics can be computed from the samples. A later line replaces an
        # earlier one of the same trajectory.
        of_step = {sample["trajectory"]: sample for sample in samples if sample["step"] == step}.values()
        assert len(of_step) == 4
        lengths = [len(sample["response"]) for sample in of_step]
        assert figures["reward/compute_score/length_in_letters/mean"] == pytest.approx(sum(lengths) / 4)
        assert figures["reward/compute_score/mean"] == pytest.approx(sum(length % 2 for length in lengths) / 4)
        assert figures["reward/other/mean"] == 0.5
        assert figures["reward/other/std"] == 0.0
        assert all(sample["reward"] == sample["reward_components"]["compute_score"] + 1.0 for sample in of_step)
        tags = [name for name in figures if name.startswith("reward/")]
        assert any("format" in name for name in tags)
        assert all(re.fullmatch(r"[A-Za-z0-9_./-]+", name) for name in tags)
        assert not any("note" in name for name in tags)


def test_names_from_user_code_become_distinct_tags() -> None:
    components: list[dict[str, float]] = [
        {"a b": 1.0, "a?b": 3.0, "f/é ü/": 5.0, "": 7.0, "x" * 500: 9.0},
        {"a b": 2.0},
    ]
    figures = reward_metrics(components)
    assert figures["reward/a_b/mean"] == 1.5
    assert figures["reward/a_b/std"] == 0.5
    assert figures["reward/a_b_2/mean"] == 3.0
    assert len(figures) == 10
    assert all(len(name) < 100 and re.fullmatch(r"[A-Za-z0-9_./-]+", name) for name in figures)


def test_only_finite_numbers_become_components(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    code = (
        "import numpy\ndef f(data_source, solution_str, ground_truth):\n    return {'score': 1, 'a': numpy.float32(2), "
    )
    code += (
        "'b': True, 'c': 'text', 'd': float('nan'), 'e': numpy.ones(2), 'g': 1e308, **{str(n): n for n in range(99)}}"
    )
    (tmp_path / "f.py").write_text(code)
    result = RewardScorer(RewardConfig(functions=["f.py:f"]), tmp_path).score(Problem(key="", prompt=""), "")
    assert result.components["f"] == 1.0
    assert result.components["f/a"] == float(numpy.float32(2))
    assert result.components["f/b"] == 1.0
    assert not {"f/c", "f/d", "f/e", "f/g"} & result.components.keys()
    assert len(result.components) == 33
    assert all(map(math.isfinite, result.components.values()))
