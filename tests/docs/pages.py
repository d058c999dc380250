"""The pages of `docs/`, their code blocks, and a tiny chat model in place of the one that they name."""

from __future__ import annotations

import re
import string
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODEL = "Qwen/Qwen3-0.6B"
"""The model that pages name; a folder of this name in the working directory comes before the hub."""
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    file: str
    """Its title: the name of the file that it is; empty if it has none."""
    code: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [Block(*parts) for parts in _BLOCK.findall(text)]
    assert len(found) == len(re.findall(r"^\s*```\w", text, re.MULTILINE)), f"{page.name}: a block can't be read"
    return found


def commands(block: Block) -> list[str]:
    """The lines of a console block that are typed; a backslash continues a line."""
    joined = re.sub(r" \\\n\s*", " ", block.code)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def make_chat_model(path: Path) -> None:
    """A random character model that knows all printable characters and has a chat template."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    t: Any = transformers
    letters = ["<pad>", "</s>", *string.printable]
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = _CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    t.LlamaForCausalLM(config).save_pretrained(path)
