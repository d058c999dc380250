"""How a model sees text: its chat template, and the most tokens that it can attend to."""

from __future__ import annotations

from typing import Any


def encode_chat(tokenizer: Any, messages: list[Any], *, generate: bool = True) -> list[int]:
    """The token ids of a chat in the tokenizer's template.

    With `generate` the ids end with the header of the message that the model is about to write. The template writes
    special tokens itself, so the tokenizer adds none.
    """
    text = render_chat(tokenizer, messages, generate=generate)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def render_chat(tokenizer: Any, messages: list[Any], *, generate: bool = True) -> str:
    """The text of a chat in the tokenizer's template."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    return text


def model_context(config: Any) -> int | None:
    """The most positions that a model of `transformers` has, from its configuration; None if it sets no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
