"""Real runs of `GRPOTrainer`: callbacks, resuming, LoRA, conversations. test_page.py has a whole script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from dora_rl import UserError
from dora_rl.trl import GRPOConfig, GRPOTrainer
from tests.runtime.making import PATIENCE

SMALL: dict[str, Any] = {
    "dora": {"rollout.instances": 1, "rollout.heartbeat_seconds": 0.05, "reward.timeout_seconds": PATIENCE},
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "disable_tqdm": True,
    "learning_rate": 1e-2,
}
ROWS = [{"prompt": f"{number}+1=", "length": number} for number in range(1, 9)]


def odd(completions: list[str], length: list[int], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    assert len(length) == len(completions)
    log_extra("read", [f"<{text}>" for text in completions])
    log_metric("length", sum(length) / len(length))
    return [sum(letter in "13579" for letter in text) / 8 for text in completions]


class Recorder(TrainerCallback):
    """Keeps what happened, and stops after some update."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.calls: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.checkpoints: list[Path] = []

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("init", state.max_steps))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.calls.append(("step", state.global_step))
        control.should_training_stop = state.global_step == self.stop_after
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        assert metrics.keys() & {"eval_reward", "test_reward"}
        self.calls.append(("evaluate", 0))

    def on_save(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        self.checkpoints.append(values["checkpoint"])
        assert (values["checkpoint"] / "policy" / "model.safetensors").exists()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls.append(("end", state.global_step))


@pytest.fixture
def model(job: Path) -> str:
    return str(job / "model")


def test_callbacks_stop_a_run_and_it_is_resumed(model: str, tmp_path: Path) -> None:
    def trainer(callback: Recorder, **other: Any) -> GRPOTrainer:
        args = GRPOConfig(
            str(tmp_path / "out"),
            max_steps=4,
            logging_steps=2,
            save_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            num_generations_eval=1,
            run_name="mine",
            **{**SMALL, **other},
        )
        return GRPOTrainer(model, odd, args, ROWS, ROWS[:2], callbacks=[callback])

    first = Recorder(stop_after=2)
    stopped = trainer(first)
    output = stopped.train()
    assert stopped.run is not None
    assert (stopped.run.name, stopped.run.state, output.global_step) == ("mine", "stopped", 2)
    assert [call for call in first.calls if call[0] != "evaluate"] == [
        ("init", 4),
        ("begin", 0),
        ("step", 1),
        ("step", 2),
        ("end", 2),
    ]
    assert [log["step"] for log in first.logs] == [2.0]
    assert first.checkpoints[0].parent == stopped.run.path / "checkpoints"

    with pytest.raises(UserError, match=r"'trainer.optimiser.learning_rate' is 0.5 here and 0.01 in"):
        trainer(Recorder(), learning_rate=0.5).train(resume_from_checkpoint=True)
    second = Recorder()
    resumed = trainer(second)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    assert resumed.run is not None
    assert (resumed.run.path, resumed.run.state) == (stopped.run.path, "finished")
    assert [call for call in second.calls if call[0] != "evaluate"][1:] == [
        ("begin", 2),
        ("step", 3),
        ("step", 4),
        ("end", 4),
    ]
    logs = [log for log in resumed.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2.0, 4.0]
    means = [record["reward/mean"] for record in resumed.run.metrics]
    assert [log["reward"] for log in logs] == pytest.approx([sum(means[:2]) / 2, sum(means[2:]) / 2])
    assert [log["step"] for log in resumed.state.log_history if "eval_reward" in log] == [0.0, 4.0]
    assert ("evaluate", 0) in [*first.calls, *second.calls]

    samples = list(resumed.run.samples())
    assert all(sample["reward_notes"] == {"odd/read": f"<{sample['response']}>"} for sample in samples)
    of_first = [sample["reward_components"]["odd/length"] for sample in samples if sample["step"] == 0]
    assert len(of_first) == 4  # all of them: two groups of two
    assert resumed.run.metrics[0]["reward/odd/length/mean"] == pytest.approx(sum(of_first) / 4)

    found = resumed.evaluate()
    (last,) = [one for one in resumed.run.evaluations if one["version"] == 4]
    assert found["eval_reward"] == pytest.approx(last["eval/held_out/reward"])
    assert resumed.state.log_history[-1]["eval_reward"] == found["eval_reward"]
    assert set(resumed.evaluate(ROWS[:1], metric_key_prefix="test")) > {"test_reward"}
    with pytest.raises(UserError, match=f"use `dora-rl push {resumed.run.path} REPO`"):
        resumed.push_to_hub()
    resumed.save_state()
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 4


def test_lora_of_peft_and_a_model_in_memory(model: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    args = GRPOConfig(str(tmp_path / "out"), max_steps=1, beta=0.1, remove_unused_columns=True, **SMALL)

    def alone(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """The columns are removed, so this fails if one is there."""
        assert not columns.keys() - {"completion_ids"}, columns
        return [float(len(set(text))) for text in completions]

    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model),
        [alone],
        args,
        ROWS,
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=peft.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert trainer.run is not None
    assert trainer.config.settings["trainer"]["lora"] == {"rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj"]}
    assert "reference_kl" in trainer.run.metrics[0]
    trainer.save_model(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], sorted(settings["target_modules"])) == (4, 12, ["q_proj", "v_proj"])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "saved")) == len(AutoTokenizer.from_pretrained(model))
    assert trainer.model.num_parameters() == AutoModelForCausalLM.from_pretrained(model).num_parameters()


def test_conversations_are_passed_as_messages_and_early_stopping_works(model: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    rows = [{"prompt": [{"role": "user", "content": f"{number}*1"}]} for number in range(8)]

    def of_messages(prompts: Any, completions: Any, **_: Any) -> list[float]:
        assert all(prompt[0]["role"] == "user" for prompt in prompts)
        assert all(len(one) == 1 and one[0]["role"] == "assistant" for one in completions)
        return [-1.0 if one[0]["content"] is None else 1.0 for one in completions]

    args = GRPOConfig(
        str(tmp_path / "out"),
        max_steps=500,
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
        metric_for_best_model="reward",
        save_strategy="no",
        **SMALL,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=1)
    trainer = GRPOTrainer(model, of_messages, args, rows, rows[:1], tokenizer, callbacks=[stopping])
    trainer.train()
    assert trainer.run is not None
    assert trainer.run.state == "stopped"  # the reward is always 1, so it never becomes better
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 0)
    assert trainer.run.metrics[0]["reward/mean"] == 1.0
