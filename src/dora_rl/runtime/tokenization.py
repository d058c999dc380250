"""Between problems and tokens: the one place where prompts are encoded and responses decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dora_rl.core.errors import ConfigError
from dora_rl.envs.data import Problem
from dora_rl.models.text import encode_chat, render_chat
from dora_rl.runtime.config import RunConfig

_PLACE = "\u241e"
"""Stands for the policy's message when the frame around it is looked for; no template says it."""


class Tokenization:
    """A model's tokenizer, and what its config says of ends and experts."""

    def __init__(self, tokenizer: Any, config: RunConfig) -> None:
        from transformers import AutoConfig

        if tokenizer is None:
            raise ConfigError(f"'model.path': '{config.model.path}' has no tokenizer beside its weights")
        self._tokenizer = tokenizer
        self._bare = bare(tokenizer)
        self._config = config
        self._encoded: dict[str, tuple[int, ...]] = {}
        self._chat = False
        """Prompts are chats."""
        described: Any = None
        if not config.model.path.endswith(".gguf"):
            described = AutoConfig.from_pretrained(config.model.path, trust_remote_code=False)
        self.mixture = any(getattr(described, name, 0) for name in ("num_experts", "num_local_experts"))
        self.stop_ids = self._ends(described)

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """The prompt's tokens; a chat goes through the model's template."""
        known = self._encoded.get(problem.key)
        if known is None:
            known = self._encoded[problem.key] = self._encode(problem)
        return known

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a response."""
        decoder = self._tokenizer if self._bare is None else self._bare
        text: str = decoder.decode(list(tokens), skip_special_tokens=True)
        return text

    def observation(self, said: str) -> tuple[int, ...]:
        """The tokens of what an environment said: as it is among texts, as a message in a chat."""
        text = said
        if self._chat:
            turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": _PLACE}]
            turns.append({"role": "user", "content": said})
            text = render_chat(self._tokenizer, turns).split(_PLACE, 1)[1]
            ends = [self._tokenizer.decode([end]) for end in self.stop_ids]
            # The token that ended the policy's message has been sampled already.
            text = next((text.removeprefix(end) for end in ends if text.startswith(end)), text)
        if self._bare is not None:
            return tuple(self._bare.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def stopped(self, tokens: Sequence[int]) -> bool:
        """These end with what ends a turn."""
        if not tokens:
            return False
        return tokens[-1] in self.stop_ids or self.decode(tokens).endswith(self._config.sampling.stop or ("\0",))

    def _encode(self, problem: Problem) -> tuple[int, ...]:
        if isinstance(problem.prompt, str):
            return tuple(self._tokenizer(problem.prompt)["input_ids"])
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"the prompts are chats, but the tokenizer of '{self._config.model.path}' has no chat template: "
                "use prompts that are texts, and leave out data.system"
            )
        self._chat = True
        messages = [{"role": message.role, "content": message.content} for message in problem.prompt]
        return tuple(encode_chat(self._tokenizer, messages))

    def _ends(self, described: Any) -> tuple[int, ...]:
        """Token ids that end a response."""
        ids = {self._tokenizer.eos_token_id, getattr(described, "eos_token_id", None)}
        ends: set[int] = set()
        for one in ids - {None}:
            ends.update(one if isinstance(one, list) else [one])
        return tuple(sorted(ends))


def bare(tokenizer: Any) -> Any:
    """The tokenizer below its wrapper of `transformers`, which takes several times as long; None if that adds anything.

    With agents the supervisor encodes and decodes something at every turn.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.clean_up_tokenization_spaces:
        return None
    below = tokenizer.backend_tokenizer
    kinds = type(tokenizer).__mro__
    theirs = [vars(kind) for kind in kinds[: kinds.index(PreTrainedTokenizerFast)]]
    changed = any(name in one for one in theirs for name in ("__call__", "_encode_plus", "decode", "_decode"))
    return None if changed or below.truncation is not None or below.padding is not None else below
