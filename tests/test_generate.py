"""`dora-rl generate` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.apps.generate import read_prompts
from dora_rl.core.errors import UserError
from tests.engine import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with weights and a tokenizer, as `save_pretrained` leaves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    letters = ["<pad>", "<s>", "</s>", *(chr(33 + index) for index in range(tiny.VOCAB - 3))]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(path)
    tiny.model("llama").save_pretrained(path)
    return path


def dora(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dora_rl.apps.cli", "generate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_output_is_what_the_model_generates(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["HELLO", "A", "B" * 300, "what?"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    out = tmp_path / "out.jsonl"
    done = dora(
        folder, "--prompts", prompts, "--out", out, "--temperature", "0", "--max-tokens", "12", "--samples", "2"
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 8
    assert "6 responses, 2 refused" in done.stderr
    assert "tokens/s" in done.stderr
    for record in records:
        if record["line"] == 3:
            assert "300 tokens" in record["error"]
            continue
        made = tiny.model("llama")
        ids = torch.tensor([[ord(letter) - 30 for letter in record["prompt"]]])
        with torch.no_grad():
            expected = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert record["tokens"] == expected[0, ids.shape[1] :].tolist()
        assert len(record["logprobs"]) == len(record["tokens"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{broken", "a.jsonl:1: not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n{"question": "y"}\n', "a.jsonl:2: 'prompt' must be"),
        ("a.txt", "\n\n", "no prompts"),
    ],
)
def test_a_bad_file_is_reported_in_one_sentence(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(path)


def test_a_missing_model_is_reported_in_one_sentence(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("hello\n")
    done = dora(tmp_path / "nothing", "--prompts", prompts)
    assert done.returncode == 2
    assert done.stderr.startswith("dora-rl: ")
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from dora_rl.apps.cli import app; app(['generate', '--help'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "--prompts" in done.stdout


def test_an_unwritable_output_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("HELLO\n")
    done = dora("no-such-model", "--prompts", prompts, "--out", prompts / "out.jsonl")
    assert done.returncode == 2
    assert f"cannot write {prompts / 'out.jsonl'}" in done.stderr.replace("\n", "")
    assert "Traceback" not in done.stderr
