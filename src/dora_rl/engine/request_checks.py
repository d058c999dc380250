"""Checks that every engine makes of a request, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dora_rl.core.errors import PromptError
from dora_rl.engine.requests import Request


def check_request(request: Request, *, vocab: int, context: int, tokenizer: Any) -> None:
    """Refuse a request that can't be served, with a typed error."""
    request.sampling.check(vocab)
    if request.sampling.stop and tokenizer is None:
        raise PromptError("stop strings need a tokenizer, and this engine has none; use stop_ids")
    tokens = request.prompt + request.response
    if not request.prompt:
        raise PromptError(f"the prompt of trajectory {request.trajectory} is empty")
    if len(tokens) >= context:
        raise PromptError(
            f"trajectory {request.trajectory} has {len(tokens)} tokens, and the context of {context} "
            "leaves none to generate"
        )
    if len(request.response) >= request.sampling.max_tokens:
        raise PromptError(f"the response of trajectory {request.trajectory} already has max_tokens")
    unknown = next((token for token in tokens if not 0 <= token < vocab), None)
    if unknown is not None:
        raise PromptError(
            f"trajectory {request.trajectory} contains the token id {unknown}, but the vocabulary ends at {vocab - 1}"
        )


def stop_window(stops: Sequence[str]) -> int:
    """Return how many tokens at the end of a response may contain a stop string."""
    # A token may stand for less than a character, never for less than a byte.
    return max(len(stop.encode()) for stop in stops) + 8


def contains_stop(tail: Sequence[int], stops: Sequence[str], tokenizer: Any) -> bool:
    """Return whether these tokens, the end of a response, contain one of the stop strings."""
    text = tokenizer.decode(list(tail))
    return any(stop in text for stop in stops)
