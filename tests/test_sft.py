"""`dora-rl sft` learns, writes a model that loads, and reports a mistake in its input in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from dora_rl.apps.cli import app
from dora_rl.core.errors import DataError, UserError
from dora_rl.trainer.sft import read_examples
from tests.trainer.factories import VOCABULARY, llama

WORDS = ["<end>", "<user>", "<assistant>", "one", "two", "three", "four", "is", "next", "after"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<end>")
    made.chat_template = template
    return made


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["sft", *arguments], catch_exceptions=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    llama(initializer_range=0.02).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("extra", [[], ["--lora-rank", "8"]], ids=["full", "lora"])
def test_it_learns_and_writes_a_model_that_loads(tmp_path: Path, model: Path, extra: list[str]) -> None:
    rows = [{"prompt": [first], "completion": [(first + 1) % 20, (first + 2) % 20, 50]} for first in range(20)]
    data = write(tmp_path / "data.jsonl", rows)
    arguments = ["--data", str(data), "--out", str(tmp_path / "out"), "--epochs", "40", "--batch-size", "20"]
    done = run(str(model), *arguments, "--learning-rate", "2e-2", *extra)
    assert done.exit_code == 0, done.output
    assert "20 examples, 40 updates, 3,200 tokens" in done.output
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = trained(torch.tensor([[first, (first + 1) % 20, (first + 2) % 20] for first in range(20)])).logits
    right = logits.argmax(-1) == torch.tensor([[(f + 1) % 20, (f + 2) % 20, 50] for f in range(20)])
    assert right.float().mean() > 0.7  # chance is a twentieth; rounding differs by processor
    again = run(str(model), *arguments)
    assert isinstance(again.exception, UserError)
    assert "already exists" in str(again.exception)


def test_text_and_chat_are_tokenised_so_that_only_the_completion_is_trained(tmp_path: Path) -> None:
    messages = {
        "prompt": [{"role": "user", "content": "one two"}],
        "completion": [{"role": "assistant", "content": "three"}],
    }
    data = write(tmp_path / "data.jsonl", [{"prompt": "one two", "completion": "three"}, messages])
    text, chat = (group.trajectories[0] for group in read_examples(data, tokenizer(), VOCABULARY, 99))

    def words(ids: Any) -> list[str]:
        return [WORDS[number] for number in ids]

    assert words(text.tokens) == ["one", "two", "three", "<end>"]
    assert words(text.tokens[text.loss_mask]) == ["three", "<end>"]
    assert words(chat.tokens) == ["<user>", "one", "two", "<end>", "<assistant>", "three", "<end>"]
    assert words(chat.tokens[chat.loss_mask]) == ["three", "<end>"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not JSON"),
        ('{"prompt": "one"}', "line 2: the line must be an object with 'prompt' and 'completion'"),
        ('{"prompt": "one", "completion": ""}', "line 2: prompt and completion must not be empty"),
        ('{"prompt": "one", "completion": [3]}', "must both be text, chat messages, or token ids"),
        ('{"prompt": [99], "completion": [3]}', "outside the model's vocabulary of 61"),
        ('{"prompt": [1, 2, 3, 4, 5], "completion": [3]}', "6 tokens are more than max_length = 5"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "one", "completion": "two"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_examples(path, tokenizer(), VOCABULARY, 5)


def test_text_needs_a_tokenizer_and_chat_a_template(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", [{"prompt": "one", "completion": "two"}])
    with pytest.raises(DataError, match="has no tokenizer"):
        read_examples(text, None, VOCABULARY, 99)
    chat = write(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user"}], "completion": [{"role": "assistant"}]}])
    with pytest.raises(DataError, match="has no chat template"):
        read_examples(chat, tokenizer(None), VOCABULARY, 99)
    with pytest.raises(DataError, match="has no examples"):
        read_examples(write(tmp_path / "empty.jsonl", []), None, VOCABULARY, 99)
    with pytest.raises(DataError, match="cannot read"):
        read_examples(tmp_path / "nowhere.jsonl", None, VOCABULARY, 99)


def test_help_needs_no_torch_and_training_says_how_to_get_it(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from dora_rl.apps.cli import main
main()
"""
    command = [sys.executable, "-c", program]
    helped = subprocess.run([*command, "sft", "--help"], capture_output=True, text=True, timeout=600)
    assert helped.returncode == 0, helped.stderr
    assert "prompt" in helped.stdout
    wanted = ["sft", "model", "--data", "data.jsonl", "--out", str(tmp_path / "out")]
    refused = subprocess.run([*command, *wanted], capture_output=True, text=True, timeout=600)
    assert refused.returncode == 2
    assert "pip install 'dora-rl[torch]'" in refused.stderr
