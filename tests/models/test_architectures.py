"""Every architecture is exact or refused. `make test-models` checks all; these tests check those that differ most."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from dora_rl.core.errors import ModelError
from dora_rl.engine import kernel_choice as choice
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.torch_runner import TorchRunner
from dora_rl.models import exactness
from dora_rl.models.sources import MemoryWeights
from dora_rl.trainer.config import TrainerConfig
from dora_rl.trainer.policy import choose_form
from dora_rl.trainer.trainer import Trainer
from tests.engine import tiny
from tests.models import architectures, table

CHECKED = (
    *(
        "gptj",
        "gpt_neo",
        "bloom",
        "falcon",
        "falcon:alibi",
        "mpt",
        "codegen",
        "diffllama",
        "xglm",
        "stablelm",
        "nemotron",
    ),
    *("doge", "deepseek_v3", "gpt2", "gpt_oss", "gemma2", "opt", "phi3", "gpt_neox", "mistral", "roberta"),
)
RECURRENT = ("mamba", "rwkv")


@pytest.mark.parametrize("name", CHECKED)
def test_exact_in_rollout_and_training(name: str) -> None:
    checked = architectures.check(name)
    assert checked.training_exact
    assert checked.rollout_exact or name == "roberta", checked.rollout
    text = table.PAGE.read_text(encoding="utf-8")
    if table.version_of(text) == transformers.__version__:
        found = table.rows_of(text)[name]
        assert found.training == f"exact, {checked.training}"
        assert found.rollout == (f"exact, {checked.rollout}" if checked.rollout_exact else "refused")


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_refused_in_one_sentence(name: str) -> None:
    model = architectures.build(name)
    with pytest.raises(ModelError, match=f"{type(model).__name__} can't be used for rollout: ") as refused:
        Engine(model, MemoryWeights.of(model), EngineConfig(kv_bytes=1 << 20))
    assert "\n" not in str(refused.value)


def test_the_page_lists_every_architecture_and_none_is_wrong() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    rows = table.rows_of(text)
    assert not [row for row in rows.values() if row.rollout == "WRONG"]
    if table.version_of(text) == transformers.__version__:
        assert sorted(rows) == sorted(architectures.names())


def test_wrong_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner whose sequences attend to each other's keys is not used; the next one is."""
    model = architectures.build("llama")
    config = EngineConfig(kernels="torch")
    assert choice.choose_runner(model, config, 128).name == "generic"
    usual = TorchRunner.forward

    def forward(self: Any, rows: Any, threads: int, record: bool) -> Any:
        rows.table[:] = rows.table[::-1].copy()
        return usual(self, rows, threads, record)

    monkeypatch.setattr(TorchRunner, "forward", forward)
    assert choice.choose_runner(architectures.build("llama"), config, 128).name == "padded"


def test_wrong_decoding_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner whose prefill is right, but whose decoding computes another token than was sampled, is not used."""
    usual = TorchRunner.forward

    def forward(self: Any, rows: Any, threads: int, record: bool) -> Any:
        if len(set(rows.sequence[: rows.count].tolist())) == rows.count:
            rows.token[: rows.count] = 41
        return usual(self, rows, threads, record)

    monkeypatch.setattr(TorchRunner, "forward", forward)
    assert choice.choose_runner(architectures.build("llama"), EngineConfig(kernels="torch"), 128).name == "padded"


def test_training_that_differs_is_refused_with_its_size() -> None:
    class Noisy(nn.Module):
        """A layer with other results in each call, like dropout that can't be switched off."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *given: Any, **named: Any) -> Any:
            return self.inner(*given, **named) + torch.randn(1)

    model = architectures.build("llama")
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM can't be used for training: with packed .* by [\d.]+ of"):
        Trainer(model, TrainerConfig())


def test_choosing_a_form_leaves_the_model_unchanged() -> None:
    model = architectures.build("gptj")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = exactness.attention_of(model)
    form = choose_form(model)
    assert not form.packed
    assert exactness.attention_of(model) == own
    choice.choose_runner(model, EngineConfig(), 128)
    assert exactness.attention_of(model) == own
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("length", [16, 17, 18, 40])
def test_a_sliding_window_ends_where_that_of_transformers_ends(kernels: str, length: int) -> None:
    """Gemma-2 with a window of 16 tokens and a soft cap, and Mistral with a window of 8."""
    for model in (tiny.model("gemma2"), architectures.build("mistral")):
        tokens = torch.randint(40, 80, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        sequences = [tokens, tokens[:5], tokens[2:12]]
        wanted = exactness.reference(model, sequences)
        chosen = choice.choose_runner(model, EngineConfig(kernels=kernels), 128)
        assert chosen.name == "generic"
        assert choice.measure(model, chosen, sequences, wanted).share < 1e-4


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_sliding_window_in_training_too(kind: str) -> None:
    # Windows have 8 tokens, trajectories up to 25. With a wrong window, packing would be refused and padding used.
    assert architectures.check(kind).training == "packed"


def test_a_mixture_with_recurrent_layers_is_neither_served_nor_packed() -> None:
    """In a packed batch the first sequence is right, but the later ones continue from its state."""
    checked = architectures.check("qwen3_next")
    assert not checked.rollout_exact
    assert checked.training == "padded"


@pytest.mark.parametrize("name", ["gptj", "gpt_oss"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    group = architectures.group()
    norms = []
    for checkpointing in (False, True):
        trainer = Trainer(architectures.build(name), TrainerConfig(gradient_checkpointing=checkpointing))
        trainer.accumulate(0, [group])
        norms.append(trainer.apply(0).metrics["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
