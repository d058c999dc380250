"""An algorithm is one file: the registry finds it, the settings accept its name, and the trainer trains with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dora_rl.core.config import build
from dora_rl.core.errors import ConfigError
from dora_rl.trainer import algorithms
from dora_rl.trainer.algorithms import all_algorithms, get_algorithm
from dora_rl.trainer.config import TrainerConfig
from tests.trainer.factories import groups, llama, trainer

TOY = '''"""A toy: the reward is the advantage, and nothing is clipped."""

from dora_rl.trainer.algorithms.algorithm import Algorithm, Clip, TokenBatch, TokenLoss
from dora_rl.trainer.algorithms.grpo import GRPO


def plain(tokens: TokenBatch, _: Clip) -> TokenLoss:
    ratio = tokens.log_ratio.detach().exp()
    return TokenLoss(-tokens.advantages * tokens.logprobs, ratio, ratio < 0)


assert GRPO.name == "grpo"  # importing an algorithm does not define it again
TOY = Algorithm(name="toy_pg", advantage=list, policy_loss=plain, aggregation="token_mean", clip=Clip(0.2, 0.2))
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules belong to the package of algorithms."""
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    all_algorithms.cache_clear()
    yield tmp_path
    all_algorithms.cache_clear()
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(f"{algorithms.__name__}.{file.stem}", None)


def test_an_algorithm_in_one_new_file_trains_a_step(package: Path) -> None:
    (package / "toy.py").write_text(TOY)
    assert list(all_algorithms())[-2:] == ["supervised", "toy_pg"]
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = trainer(model, algorithm={"name": "toy_pg"}, optimiser={"learning_rate": 0.01})
    batch = groups(model=llama())
    made.accumulate(0, batch)
    report = made.apply(0)
    trajectories = [trajectory for group in batch for trajectory in group.trajectories]
    assert report.version == 1
    assert report.metrics["advantage/max"] == max(trajectory.reward for trajectory in trajectories)
    assert report.metrics["gradient_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(
        ConfigError, match=r"'algorithm\.name': must be a known algorithm such as 'toy_pg', not 'toypg'"
    ):
        build(TrainerConfig, {"algorithm": {"name": "toypg"}})


def test_an_unknown_name_is_refused_also_where_every_default_is_set(package: Path) -> None:
    tree = {"algorithm": {"name": "toy_pg", "aggregation": "token_mean", "clip_low": 0.1, "clip_high": 0.1}}
    with pytest.raises(ConfigError, match=r"'algorithm\.name': must be"):
        build(TrainerConfig, tree)
    assert not list(package.iterdir())


def test_two_algorithms_of_one_name_are_refused(package: Path) -> None:
    (package / "toy.py").write_text(TOY.replace("toy_pg", "grpo"))
    with pytest.raises(AssertionError, match=r"two algorithms are called 'grpo', the second one in toy\.py"):
        all_algorithms()


def test_algorithms_come_in_the_order_of_their_files() -> None:
    assert list(all_algorithms()) == [
        "cispo",
        "dapo",
        "dr_grpo",
        "grpo",
        "gspo",
        "longcat",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "rloo",
        "supervised",
    ]
    assert all(get_algorithm(name).name == name for name in all_algorithms())
