"""A job so small that a whole run takes a second or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dora_rl.core.config import build
from dora_rl.runtime.config import RunConfig
from dora_rl.runtime.run_dir import RunDir

PATIENCE = 600.0
"""Seconds of every deadline and every wait that a test is not about: only a failure takes that long."""
LETTERS = "0123456789*+="
TASK = '''
import os, pathlib, time, zlib

HERE = pathlib.Path(__file__).parent

def problems(count=64):
    return [{"prompt": f"{n}*{n % 9 + 1}+{n % 10}=", "answer": str(n % 10)} for n in range(1, count + 1)]

def reward(prompts, completions, **_):
    return [sum(letter in "13579" for letter in text) / 48 - len(text) / 200 for text in completions]

def once(name):
    """True only for the first call, over all processes."""
    try:
        os.close(os.open(HERE / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def hangs_once(prompts, completions, **_):
    if once("hung"):
        time.sleep(3600)
    return reward(prompts, completions)

def waits_to_be_released(prompts, completions, **_):
    while not (HERE / "released").exists():
        time.sleep(0.01)
    return reward(prompts, completions)

def kills_once(prompts, completions, **_):
    if once("killed"):
        os.kill(os.getpid(), 9)
    return reward(prompts, completions)

def kills_always(prompts, completions, **_):
    os.kill(os.getpid(), 9)

def hangs_always(prompts, completions, **_):
    time.sleep(3600)

def raises_always(prompts, completions, **_):
    raise ValueError("never again")

def unhurried(prompts, completions, **_):
    """Slow until the file `hurry` exists, so that a run lasts as long as a test needs."""
    if not (HERE / "hurry").exists():
        time.sleep(0.2)
    return reward(prompts, completions)

def waits_for_hurry(prompts, completions, **_):
    while not (HERE / "hurry").exists():
        time.sleep(0.01)
    return reward(prompts, completions)

def solved_thirds(prompts, completions, **_):
    """Every third prompt is solved by any response; the responses to the others are told apart."""
    solved = [int(prompt.split("*")[0]) % 3 == 0 for prompt in prompts]
    return [1.0 if one else zlib.crc32(text.encode()) / 2**33 for one, text in zip(solved, completions)]

def huge(prompts, completions, **_):
    return [3e38 if len(text) % 2 else -3e38 for text in completions]
'''


def make_model(path: Path, layers: int = 2, hidden: int = 32) -> None:
    """A random character model with its tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    t: Any = transformers
    letters = ["<pad>", "</s>", *LETTERS]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(path)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    t.LlamaForCausalLM(config).save_pretrained(path)


def settings(base: Path, mode: str = "dora", **control: Any) -> dict[str, Any]:
    """The configuration of the small job as a tree; its model and task are in `base`."""
    return {
        "model": {"path": str(base / "model")},
        "data": {"source": "task.py:problems"},
        "reward": {"functions": ["task.py:reward"], "timeout_seconds": PATIENCE},
        "control": {
            "mode": mode,
            "max_staleness": 3,
            "groups_per_step": 2,
            "group_size": 2,
            "steps": 4,
            "max_response_tokens": 48,
            "deadlines": dict.fromkeys(("load", "move", "score", "heartbeat", "progress", "train", "stall"), PATIENCE),
            **control,
        },
        "rollout": {
            "instances": 2,
            "heartbeat_seconds": 0.2,
            "engine": {
                "max_requests": 4,
                "kv_bytes": 1 << 22,
                "host_bytes": 1 << 22,
                "max_context": 80,
                "stream_every": 4,
                "stretch": 1,  # requests that last longer are moved more often
            },
        },
        "trainer": {"optimiser": {"learning_rate": 1e-3}},
        "logging": {"tensorboard": False},
        "supervision": {"backoff_seconds": 0.05},
        "threads": 1,
        "seed": 1,
        "out": str(base / "runs"),
    }


def make_base(base: Path) -> Path:
    """Make the directory with the model and the task."""
    base.mkdir(parents=True, exist_ok=True)
    make_model(base / "model")
    (base / "task.py").write_text(TASK)
    return base


def make_run(base: Path, name: str, tree: dict[str, Any]) -> RunDir:
    """The directory of a run that was not started yet."""
    return RunDir.create(build(RunConfig, tree), base, name)


def merged(tree: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the values of `other`."""
    result = dict(tree)
    for key, value in other.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
