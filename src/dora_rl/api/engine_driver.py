"""Drives a built-in engine for `dora_rl.Engine` and its sessions: one loop, which gives each report to its request.

Invariants:
- every report of the engine passes through `_take`, so no call loses tokens of a request that it does not wait for;
- a request that a call has submitted is gone when the call ends, also if it ends with an exception; only sessions stay.

Torch is imported when an engine is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dora_rl.core.config import build
from dora_rl.core.errors import BundleError, ConfigError, ModelError, PromptError, SamplingError, UserError
from dora_rl.core.events import Parked, SlotLoadFailed
from dora_rl.core.types import TrajectoryId, Version
from dora_rl.engine.config import EngineConfig
from dora_rl.engine.requests import FinishReason, Request, Sampling, StepOutput
from dora_rl.models.loading import ModelConfig

if TYPE_CHECKING:
    from dora_rl.core.tokens import TokenChunk
    from dora_rl.engine.kv_transfer.format import MovedRequest

INSTALL = "an engine needs torch and transformers: pip install 'dora-rl[torch]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A response, or one turn of a session."""

    version: int
    """The version that generated it: all its tokens."""
    prompt_tokens: tuple[int, ...]
    """Everything before its first token."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, under the distribution that it was sampled from: after temperature, bias and truncation."""
    model_logprobs: tuple[float, ...]
    """Of each token at this temperature, without bias and truncation."""
    text: str
    """Without special tokens; empty if the model has no tokenizer."""
    finish_reason: Literal["stop", "length", "context", "failed"]
    """A stop token or string; `max_tokens`; the context is full; the model's logits are not finite."""


@dataclass(slots=True)
class Turn:
    """What the engine has reported of a request since it was submitted or extended."""

    context: tuple[int, ...]
    """All tokens before the turn."""
    chunks: list[TokenChunk] = field(default_factory=list)
    reason: FinishReason | None = None
    """Why the turn has ended; None while it runs."""
    parked: bool = False
    """The request waits in the engine, with its KV."""
    returned: bool = False
    """A session has returned the turn to its caller."""


class EngineDriver:
    """An engine with the tokenizer of its model, and the requests that it has."""

    def __init__(self, model: ModelConfig, settings: Mapping[str, Any], kv_tokens: int | None) -> None:
        try:
            import torch  # noqa: F401
            import transformers
        except ImportError as error:
            raise UserError(INSTALL) from error
        from dora_rl.engine.engine import Engine
        from dora_rl.models.loading import load
        from dora_rl.models.sources import MemoryWeights
        from dora_rl.models.text import end_ids

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model_config = model
        loaded = load(model)
        self._model: Any = loaded.model
        self._tokenizer: Any = loaded.tokenizer
        self._ends = end_ids(loaded.model, loaded.tokenizer)
        self._weights = MemoryWeights()
        config = _engine_config(self._model, settings, kv_tokens)
        self.engine = Engine(self._model, self._weights, config, tokenizer=loaded.tokenizer)
        self._turns: dict[TrajectoryId, Turn] = {}

    # -- versions -----------------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[Version]:
        """The versions that can be used, oldest first."""
        return sorted(slot.version for slot in self.engine.slots if slot.version is not None)

    def load(self, version: Version, source: object) -> None:
        """Load weights into a free slot."""
        if version in self.versions:
            raise UserError(f"version {version} is already loaded: unload it first, or choose another number")
        free = next((slot.index for slot in self.engine.slots if slot.version is None), None)
        if free is None:
            raise UserError(
                f"the engine has {len(self.versions)} versions, which is its 'max_versions': unload one first"
            )
        self._weights.put(version, self._tensors(source))
        self.engine.load(free, version)
        self.engine.wait_for_loads()
        failed = [event for event in self._take(self.engine.drain()).events if isinstance(event, SlotLoadFailed)]
        if failed:
            self._weights.drop(version)
            raise ModelError(f"version {version} can't be loaded: {failed[0].reason}")

    def unload(self, version: Version) -> None:
        """Free the slot of a version that has no requests."""
        slot = self.slot(version)
        self.engine.unload(slot)
        self._weights.drop(version)

    def slot(self, version: Version) -> int:
        """The slot that serves a version."""
        for slot in self.engine.slots:
            if slot.version == version:
                return slot.index
        have = ", ".join(map(str, self.versions)) or "none"
        raise UserError(f"version {version} is not loaded; loaded are: {have}")

    def _tensors(self, source: object) -> dict[str, Any]:
        """The weights of a source by their names in the model, in its dtype; a module that may change is copied."""
        from dora_rl.engine.runner import named
        from dora_rl.models.loading import load

        if source is None:
            given, owned = self._model.state_dict(), True
        elif isinstance(source, str | Path):
            path = self._model_config.model_copy(update={"path": str(source)})
            given, owned = load(path).model.state_dict(), True
        elif isinstance(source, Mapping):
            given, owned = source, False
        elif hasattr(source, "state_dict"):
            given, owned = source.state_dict(), False
        else:
            raise UserError(
                f"weights are a folder, a hub name, a module or its state_dict, not {type(source).__name__}"
            )
        own = self._model.state_dict()
        unknown = next((name for name in given if name not in own), None)
        if unknown is not None:
            raise ModelError(f"the weights have '{unknown}', which '{self._model_config.path}' does not have")
        for name, twin in (getattr(self._model, "all_tied_weights_keys", None) or {}).items():
            if name in given and twin in given and not given[name].equal(given[twin]):
                raise ModelError(f"the weights '{name}' and '{twin}' differ, but the model has them as one")
        # All parameters by all their names, so that equal weights have equal fingerprints.
        buffers = {name: given.get(name, own[name]) for name in own}
        tensors = {**buffers, **named(self._model, given)}
        like = {name: own[name] for name in tensors}
        return {
            name: tensor.detach().to(device=like[name].device, dtype=like[name].dtype, copy=not owned)
            for name, tensor in tensors.items()
        }

    # -- text ---------------------------------------------------------------------------------------------------

    def encode_prompt(self, prompt: object) -> tuple[int, ...]:
        """The tokens of a prompt: token ids, a text, or messages in the chat template."""
        from dora_rl.models.text import encode_prompt

        ids = _token_ids(prompt)
        return ids if ids is not None else tuple(encode_prompt(self._need_tokenizer(), _text_or_messages(prompt)))

    def encode_observation(self, observation: object) -> tuple[int, ...]:
        """The tokens of what follows a turn: token ids, a text as it is, or messages in the chat template."""
        from dora_rl.models.text import render_next_messages

        ids = _token_ids(observation)
        if ids is not None:
            return ids
        tokenizer, given = self._need_tokenizer(), _text_or_messages(observation)
        if not isinstance(given, str):
            if tokenizer.chat_template is None:
                raise UserError("the observation is a list of messages, but the model's tokenizer has no chat template")
            given = render_next_messages(tokenizer, given, self._ends)
        return tuple(tokenizer(given, add_special_tokens=False)["input_ids"])

    def sampling(self, given: Sampling | None) -> Sampling:
        """Sampling settings in which the model's own end tokens end a response, unless others are given."""
        import msgspec

        sampling = given or Sampling()
        if isinstance(sampling.stop, str):
            raise SamplingError("'stop' must be several strings: write stop=(text,)")
        changed: Sampling = msgspec.structs.replace(sampling, stop_ids=sampling.stop_ids or self._ends)
        return changed

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Accept a request, or refuse it with a `RequestError`."""
        limit, room = request.length_limit(self.engine.context), self.engine.spec().kv_tokens
        if limit > room:
            raise PromptError(
                f"prompt and response may have {limit} tokens, but the KV cache holds {room}: raise 'kv_tokens', or "
                "lower 'max_tokens'"
            )
        self.engine.submit(request, self.slot(request.version))
        self._turns[request.trajectory] = Turn(request.prompt)

    def pack(self, trajectory: TrajectoryId) -> bytes:
        """Take a parked request out of the engine, with its KV; it is gone, or `unpack` puts it back."""
        return self.engine.export([trajectory], shared=False).to_bytes()

    def unpack(self, data: bytes) -> None:
        """Put a parked request into the engine; nothing of it is computed again."""
        from dora_rl.engine.kv_transfer.format import KvBundle

        slot = self.slot(self.read(data).request.version)
        _, errors = self.engine.import_(KvBundle.from_bytes(data), slot)
        if errors:
            raise errors[0]

    def read(self, data: bytes) -> MovedRequest:
        """The request in packed data, without its KV; `BundleError` if it is damaged."""
        from dora_rl.engine.kv_transfer.format import KvBundle

        frames = KvBundle.from_bytes(data).frames()
        if len(frames) != 1:
            raise BundleError(f"this is a bundle of {len(frames)} requests, not an exported session")
        if frames[0].error is not None:
            raise frames[0].error
        assert frames[0].moved is not None
        return frames[0].moved

    def adopt(self, request: Request) -> None:
        """Keep account of a parked request that has arrived from another engine."""
        self._turns[request.trajectory] = Turn(
            request.prompt + request.response, reason=FinishReason.STOP, parked=True, returned=True
        )

    def extend(self, trajectory: TrajectoryId, tokens: Sequence[int]) -> None:
        """Append tokens to a parked request and begin its next turn."""
        last = self._turns[trajectory]
        self.engine.extend(trajectory, 0, tokens)
        self._turns[trajectory] = Turn((*last.context, *_tokens(last), *tokens))

    def turn(self, trajectory: TrajectoryId) -> Turn:
        """The last turn of a request, as far as it has come."""
        return self._turns[trajectory]

    def finish(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Compute until the turns of these requests have ended; the other requests are advanced too."""
        waiting = [trajectory for trajectory in trajectories if self._turns[trajectory].reason is None]
        while waiting:
            assert self.engine.busy, "a request is neither running nor at its end"
            self._take(self.engine.step())
            waiting = [trajectory for trajectory in waiting if self._turns[trajectory].reason is None]

    def completion(self, trajectory: TrajectoryId, version: Version) -> Completion:
        """The last turn of a request, which has ended."""
        turn = self._turns[trajectory]
        assert turn.reason is not None
        for chunk in turn.chunks:
            assert chunk.version == version, f"a token of version {chunk.version} in a response of version {version}"
        tokens = _tokens(turn)
        return Completion(
            version=version,
            prompt_tokens=turn.context,
            tokens=tokens,
            logprobs=tuple(value for chunk in turn.chunks for value in chunk.logprobs.tolist()),
            model_logprobs=tuple(value for chunk in turn.chunks for value in chunk.model_logprobs.tolist()),
            text="" if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=True),
            finish_reason=turn.reason.value,
        )

    def drop(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Forget these requests, whatever state they are in."""
        for trajectory in trajectories:
            self.engine.abort(trajectory, 0)
            self._take(self.engine.drain())
            self._turns.pop(trajectory, None)

    def _take(self, output: StepOutput) -> StepOutput:
        """Give each report to its request."""
        for chunk in output.chunks:
            self._turns[chunk.trajectory].chunks.append(chunk)
        for finished in output.finished:
            self._turns[finished.trajectory].reason = finished.reason
        for event in output.events:
            if isinstance(event, Parked):
                self._turns[event.trajectory].parked = True
        return output

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise UserError(f"'{self._model_config.path}' has no tokenizer beside its weights: give token ids")
        return self._tokenizer


def _engine_config(model: Any, settings: Mapping[str, Any], kv_tokens: int | None) -> EngineConfig:
    """The config of the engine, with a KV cache for so many tokens."""
    from dora_rl.engine.kernel_choice import choose_runner
    from dora_rl.models.text import model_context

    config = build(EngineConfig, settings, "engine")
    if kv_tokens is None:
        return config
    if kv_tokens <= config.block_size:
        raise ConfigError(f"'kv_tokens' must be more than {config.block_size}, the size of a block, not {kv_tokens}")
    context = min(config.max_context, model_context(model.config) or config.max_context)
    shape = choose_runner(model, config, context).shape
    return config.model_copy(update={"kv_bytes": shape.blocks(kv_tokens) * shape.block_bytes})


def _tokens(turn: Turn) -> tuple[int, ...]:
    return tuple(token for chunk in turn.chunks for token in chunk.tokens.tolist())


def _token_ids(given: object) -> tuple[int, ...] | None:
    """The token ids that were given instead of text, or None."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return None
    with contextlib.suppress(TypeError, ValueError):
        values = [one.item() if hasattr(one, "item") else one for one in given]
        if all(isinstance(one, int) and not isinstance(one, bool) for one in values):
            return tuple(values)
    return None


def _text_or_messages(given: Any) -> str | Sequence[Mapping[str, str]]:
    if isinstance(given, str):
        return given
    if isinstance(given, Sequence) and all(isinstance(one, Mapping) and "content" in one for one in given):
        return given
    raise PromptError("a prompt is a text, a list of messages with role and content, or a list of token ids")
