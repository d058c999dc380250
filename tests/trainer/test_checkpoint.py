"""A checkpoint is complete or absent, loads with `transformers`, and a run resumes from it as if never stopped."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_rl.core.errors import CheckpointError
from dora_rl.trainer import checkpoint
from dora_rl.trainer.trainer import Trainer
from tests.trainer.factories import groups, llama, moe, trainer

FAST: dict[str, Any] = {"optimiser": {"learning_rate": 1e-2, "warmup_updates": 4}}
LORA: dict[str, Any] = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, **FAST}
OFFLOAD: dict[str, Any] = {"optimiser": {"learning_rate": 1e-2, "offload": True}}


def train(made: Trainer, steps: int) -> None:
    for _ in range(steps):
        step = made.version
        made.accumulate(step, groups(seed=step, version=step))
        made.apply(step)


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


@pytest.mark.parametrize("settings", [FAST, LORA, OFFLOAD], ids=["full", "lora", "offload"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    straight = trainer(llama(), **settings)
    train(straight, 2)
    path = checkpoint.save(tmp_path, straight, last_step={"groups": 6})
    train(straight, 2)

    torch.manual_seed(77)  # an adapter starts at random, and its first values must come from the checkpoint
    resumed = trainer(llama(), **settings)
    restored = checkpoint.restore(path, resumed)
    assert (restored.version, restored.last_step) == (2, {"groups": 6})
    train(resumed, 2)
    assert resumed.version == 4
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_random_state_comes_back(tmp_path: Path) -> None:
    made = trainer(llama())
    path = checkpoint.save(tmp_path, made)
    wanted = torch.rand(3)
    torch.manual_seed(99)
    checkpoint.restore(path, made)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("settings", [FAST, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("make", [llama, moe], ids=["dense", "moe"])
def test_the_policy_folder_loads_with_transformers(tmp_path: Path, settings: dict[str, Any], make: Any) -> None:
    made = trainer(make(), **settings)
    train(made, 1)
    path = checkpoint.save(tmp_path, made)
    loaded = AutoModelForCausalLM.from_pretrained(path / "policy")
    assert loaded.config._attn_implementation == "sdpa"
    ids = torch.arange(12)[None]
    made.model.set_attn_implementation("sdpa")
    made.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, made.model(ids).logits, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(loaded(ids).logits, make()(ids).logits, atol=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft uses that name
def test_an_adapter_is_saved_beside_the_merged_policy(tmp_path: Path) -> None:
    from peft import PeftModel

    made = trainer(llama(), **LORA)
    train(made, 1)
    path = checkpoint.save(tmp_path, made)
    loaded = PeftModel.from_pretrained(llama(), path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(path / "policy")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, merged(ids).logits, atol=2e-5, rtol=1e-4)


def test_only_the_newest_are_kept_and_none_is_overwritten(tmp_path: Path) -> None:
    made = trainer(llama())
    first = checkpoint.save(tmp_path, made, keep=2)
    again = checkpoint.save(tmp_path, made, keep=2)
    assert first != again
    train(made, 1)
    last = checkpoint.save(tmp_path, made, keep=2)
    assert sorted(tmp_path.iterdir()) == [again, last]
    assert checkpoint.latest(tmp_path) == last


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, trainer(llama()))
    with pytest.raises(CheckpointError, match=r"another model: they differ in 'model\.layers\.2"):
        checkpoint.restore(path, trainer(llama(num_hidden_layers=3)))
    with pytest.raises(CheckpointError, match=r"another model: they differ in 'model\.layers\.0\.mlp"):
        checkpoint.restore(path, trainer(llama(intermediate_size=56)))
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.restore(tmp_path, trainer(llama()))
    assert checkpoint.latest(tmp_path / "nowhere") is None


def _save_forever(folder: str, ready: Any, seconds: Any) -> None:
    """Save versions 1, 2, 3 ..., with all weights equal to the version, so that a mixture would be visible."""
    torch.set_num_threads(1)
    made = trainer(llama(tie_word_embeddings=True))
    start = checkpoint.latest(Path(folder))
    if start is not None:
        checkpoint.restore(start, made)
    while True:
        begin = time.perf_counter()
        made.version += 1
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.fill_(made.version)
        checkpoint.save(Path(folder), made, last_step={"version": made.version})
        seconds.value = time.perf_counter() - begin
        ready.set()


def test_kill_at_fifty_random_moments_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # a fresh process, without importing torch again each time
    context.set_forkserver_preload(["tests.trainer.test_checkpoint"])
    generator = random.Random(0)
    before, cut_short = 0, 0
    for _ in range(50):
        ready, seconds = context.Event(), context.Value("d", 0.0)
        process = context.Process(target=_save_forever, args=(str(tmp_path), ready, seconds))
        process.start()
        assert ready.wait(60)
        process.join(generator.uniform(0, 2) * seconds.value)  # within the next two saves, on any machine
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        cut_short += any(entry.name.startswith(".partial-") for entry in tmp_path.iterdir())
        path = checkpoint.latest(tmp_path)
        assert path is not None
        made = trainer(llama(tie_word_embeddings=True))
        restored = checkpoint.restore(path, made)
        assert restored.version > before, "an older checkpoint than last time"
        before = restored.version
        assert restored.last_step == {"version": restored.version}
        for tensor in weights(made).values():
            assert (tensor == restored.version).all()
    assert cut_short > 5, "too few kills happened during a save"
