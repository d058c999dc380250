"""How a model sees text: its chat template, and the most tokens that it can attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dora_rl.core.errors import UserError

_PLACEHOLDER = "\u241e"
"""Stands for the policy's message while the text around it is determined; no template contains it."""


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """The token ids of a prompt: a text, or a chat in the tokenizer's template."""
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    if tokenizer.chat_template is None:
        raise UserError("the prompts are messages, but the model's tokenizer has no chat template")
    return encode_chat(tokenizer, list(prompt))


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response, from the model's configuration."""
    ids = model.generation_config.eos_token_id
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


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


def render_next_messages(tokenizer: Any, messages: Sequence[Any], stop_ids: Sequence[int]) -> str:
    """The text of messages that follow the policy's message in a chat, up to the header of its next message."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": _PLACEHOLDER}, *messages]
    text = render_chat(tokenizer, turns).split(_PLACEHOLDER, 1)[1]
    # The token that ended the policy's message has already been sampled.
    stops = [tokenizer.decode([end]) for end in stop_ids]
    return next((text.removeprefix(end) for end in stops if text.startswith(end)), text)


def model_context(config: Any) -> int | None:
    """The most positions that a model of `transformers` has, from its configuration; None if it sets no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
