"""What has no equivalent is refused in the constructor, by name, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, ProgressCallback, TrainerCallback

from dora_rl import ConfigError, UserError
from dora_rl.trl import GRPOConfig, GRPOTrainer
from dora_rl.trl.lora import lora_settings
from dora_rl.trl.policies import given_tokenizer

ROWS = [{"prompt": "1+1="}] * 8


def ones(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def needs_state(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    return [trainer_state.global_step] * len(completions)


class Saves(TrainerCallback):
    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = True


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"reward_processing_classes": object()}, "`reward_processing_classes` has no equivalent"),
        ({"quantization_config": object()}, "`quantization_config` has no equivalent"),
        ({"tools": [ones]}, "`tools` has no equivalent in dora-rl: tools are an environment"),
        ({"rollout_func": ones}, "`rollout_func` has no equivalent"),
        ({"environment_factory": ones}, "`environment_factory` has no equivalent"),
        ({"optimizers": (object(), None)}, "AdamW is set by the fields of `args`"),
        ({"train_dataset": None}, "`train_dataset` is missing"),
        ({"reward_funcs": "some/reward-model"}, "'some/reward-model' is a reward model, and dora-rl has none"),
        ({"reward_funcs": [ones, needs_state]}, "needs_state needs `trainer_state`"),
        ({"callbacks": [ProgressCallback]}, "ProgressCallback overrides on_"),
        ({"callbacks": [object()]}, "must be a TrainerCallback of transformers, not object"),
        ({"callbacks": [Saves]}, "`control.should_save`, which dora-rl can't do at once"),
        ({"args": object()}, "`args` must be a GRPOConfig of dora_rl.trl"),
        ({"peft_config": object()}, "`peft_config` must be a LoraConfig of peft, not object"),
        ({"args": GRPOConfig(eval_strategy="steps")}, "`eval_dataset` is missing"),
    ],
)
def test_arguments(
    arguments: dict[str, Any], sentence: str, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"model": str(job / "model"), "reward_funcs": ones, "train_dataset": ROWS} | arguments
    with pytest.raises(UserError) as caught:
        GRPOTrainer(**given)
    assert sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_calls_before_training(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer(str(job / "model"), ones, train_dataset=ROWS)
    assert trainer.args.output_dir == "model-GRPO"
    assert trainer.model.num_parameters() > 0
    assert len(trainer.processing_class) == 15
    with pytest.raises(UserError, match="call `train` first"):
        trainer.save_model()
    with pytest.raises(UserError, match="there is no `eval_dataset`"):
        trainer.evaluate()
    with pytest.raises(UserError, match="call `train` first"):
        trainer.evaluate(ROWS)
    with pytest.raises(UserError, match="there is no run to resume in 'model-GRPO'"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match="is not a run directory"):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it once, with `python`"):
        GRPOTrainer(str(job / "model"), ones, train_dataset=ROWS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lora_dropout": 0.1}, "'lora_dropout' = 0.1 has no equivalent"),
        ({"use_rslora": True}, "'use_rslora' = True has no equivalent"),
        ({"use_dora": True}, "'use_dora' = True has no equivalent"),
        ({"bias": "all"}, "'bias' = 'all' has no equivalent"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' = ['lm_head'] has no equivalent"),
        ({"rank_pattern": {"q_proj": 4}}, "'rank_pattern' = {'q_proj': 4} has no equivalent"),
        ({"init_lora_weights": False}, "'init_lora_weights' = False has no equivalent"),
        ({"target_modules": ".*q_proj"}, "is a pattern: list the names"),
        ({"lora_alpha": 1.5}, "must be a whole number"),
    ],
)
def test_adapters(settings: dict[str, Any], sentence: str) -> None:
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError) as caught:
        lora_settings(peft.LoraConfig(**settings), "llama")
    assert sentence in str(caught.value)


def test_targets_of_adapters() -> None:
    peft = pytest.importorskip("peft")
    assert lora_settings(peft.LoraConfig(target_modules="all-linear"), None)["targets"] == "all-linear"
    assert lora_settings(peft.LoraConfig(target_modules={"v", "q"}), None)["targets"] == ["q", "v"]
    assert lora_settings(peft.LoraConfig(), "llama")["targets"] == ["q_proj", "v_proj"]
    with pytest.raises(ConfigError, match="set 'target_modules': peft has no default"):
        lora_settings(peft.LoraConfig(), "unheard-of")


def test_which_tokenizer_is_stored(job: Path) -> None:
    path = str(job / "model")
    own = AutoTokenizer.from_pretrained(path)
    assert given_tokenizer(path, None) is None
    own.pad_token = own.eos_token
    assert given_tokenizer(path, own) is None  # it is the model's own: a model on the hub need not be in a folder
    own.chat_template = "other"
    assert given_tokenizer(path, own) is own
    model = AutoModelForCausalLM.from_pretrained(path)
    assert given_tokenizer(model, own) is own
    assert given_tokenizer(model, None).get_vocab() == own.get_vocab()  # type: ignore[union-attr]
    model.config._name_or_path = ""
    with pytest.raises(UserError, match="pass `processing_class`"):
        given_tokenizer(model, None)
