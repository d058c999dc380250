"""Encodes prompts and observations to tokens and decodes responses; no other module of the runtime does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dora_rl.core.errors import ConfigError
from dora_rl.envs.data import Problem
from dora_rl.models.text import encode_chat, render_next_messages
from dora_rl.runtime.config import RunConfig


class Tokenization:
    """A model's tokenizer, its stop tokens, and whether it is a mixture of experts."""

    def __init__(self, tokenizer: Any, config: RunConfig) -> None:
        from transformers import AutoConfig

        if tokenizer is None:
            raise ConfigError(f"'model.path': '{config.model.path}' has no tokenizer next to its weights")
        self._tokenizer = tokenizer
        self._fast = fast_tokenizer(tokenizer)
        self._config = config
        self._encoded: dict[str, tuple[int, ...]] = {}
        self._chat = False
        """Whether the prompts are chats."""
        described: Any = None
        if not config.model.path.endswith(".gguf"):
            described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
        self.mixture = any(getattr(described, name, 0) for name in ("num_experts", "num_local_experts"))
        self.stop_ids = self._stop_ids(described)

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """The tokens of the prompt; the chat template of the model is applied to a chat."""
        known = self._encoded.get(problem.key)
        if known is None:
            known = self._encoded[problem.key] = self._encode(problem)
        return known

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response."""
        decoder = self._tokenizer if self._fast is None else self._fast
        text: str = decoder.decode(list(tokens), skip_special_tokens=True)
        return text

    def observation(self, text: str) -> tuple[int, ...]:
        """The tokens of an environment's observation: as plain text, or as a message if the prompts are chats."""
        if self._chat:
            message = {"role": "user", "content": text}
            text = render_next_messages(self._tokenizer, [message], self.stop_ids)
        if self._fast is not None:
            return tuple(self._fast.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def stopped(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens end with a stop token or a stop string."""
        if not tokens:
            return False
        return tokens[-1] in self.stop_ids or self.decode(tokens).endswith(self._config.sampling.stop or ("\0",))

    def _encode(self, problem: Problem) -> tuple[int, ...]:
        if isinstance(problem.prompt, str):
            return tuple(self._tokenizer(problem.prompt)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the prompts are chats, but the tokenizer of '{self._config.model.path}' has no chat template: "
                "use plain text prompts, and leave out 'data.system'"
            )
        self._chat = True
        messages = [{"role": message.role, "content": message.content} for message in problem.prompt]
        return tuple(encode_chat(self._tokenizer, messages))

    def _stop_ids(self, described: Any) -> tuple[int, ...]:
        """Token ids that end a response."""
        ids = {self._tokenizer.eos_token_id, getattr(described, "eos_token_id", None)}
        stops: set[int] = set()
        for one in ids - {None}:
            stops.update(one if isinstance(one, list) else [one])
        return tuple(sorted(stops))


def fast_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer below the wrapper of `transformers`, or None if the wrapper changes the result.

    The wrapper takes several times as long, and with agents the supervisor encodes and decodes at every turn.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return None
    backend = tokenizer.backend_tokenizer
    bases = type(tokenizer).__mro__
    subclasses = [vars(base) for base in bases[: bases.index(PreTrainedTokenizerFast)]]
    changed = any(name in one for one in subclasses for name in ("__call__", "_encode_plus", "decode", "_decode"))
    return None if changed or backend.truncation is not None or backend.padding is not None else backend
