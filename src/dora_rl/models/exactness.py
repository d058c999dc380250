"""Does this package compute what `transformers` computes? A short comparison, made whenever a model is loaded.

The reference is the plain forward pass of the same module: eager attention, one sequence at a time, no cache and no
packing. It is compared with the log-probs that rollout or training gets for the same tokens, over the whole vocabulary.

Invariants:
- the weights are never copied: the reference is the module itself with another attention implementation, or a copy of
  it that shares its parameters;
- a model is used only in a form that agrees with the reference; if none does, the error says in one sentence which
  model it is, what was compared and by how much it differs. An exception in the comparison is a disagreement too.

The measure of a position is the root mean square, over the vocabulary, of the difference of its log-probs, relative to
the spread of the reference's log-probs. It does not depend on how sharp the model's distributions are, so an untrained
model is judged as strictly as a trained one. Of a float32 sequence the worst position counts. In half precision, and
where a rounding error may send a token to other experts, single positions differ by more than rounding, so the median
of its positions counts. The worst sequence decides: the first of a batch may be right where those behind it are not.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from dora_rl.core.errors import ModelError

# Largest difference that may be rounding, as a share of the spread of the log-probs.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
LENGTHS = (23, 5, 14)
"""Of the sequences that are compared: ragged, and longer than a block of the KV cache."""
_PADDING_AT = 5
"""Where the padding token stands in the first sequence."""
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError)
"""What a module that is called in a way it does not support may raise; `ValueError` and `ModelError` besides."""


class ExactnessDifference(NamedTuple):
    """How far two sets of log-probs are apart."""

    share: float
    """Of the spread of the reference's log-probs."""
    allowed: float

    @property
    def exact(self) -> bool:
        return self.share <= self.allowed  # false for NaN


def probe_sequences(model: Any, longest: int) -> list[list[int]]:
    """Random ordinary tokens, and the padding token in the midst of one sequence: a policy may sample that too, and a
    module that finds its positions by looking for it is not exact then. Tokens that stand for images and the like are
    left out: they mean nothing without what they stand for."""
    special = _special_tokens(model.config)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    ordinary = np.setdiff1d(np.arange(vocabulary), sorted(special))
    if not len(ordinary):
        raise ModelError(f"the vocabulary of {type(model).__name__} has special tokens only")
    random = np.random.default_rng(0)
    made: list[list[int]] = [random.choice(ordinary, min(length, longest)).tolist() for length in LENGTHS]
    padding = model.config.get_text_config().pad_token_id
    if isinstance(padding, int) and 0 <= padding < vocabulary and len(made[0]) > _PADDING_AT + 1:
        made[0][_PADDING_AT] = padding
    return made


@torch.no_grad()
def reference(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] float32 log-probs of each sequence by the plain forward pass."""
    plain = shared_copy(model)
    plain.eval()
    set_attention(plain, "eager")
    found = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)], device=model.device)
        found.append(plain(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1))
    return found


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor], model: Any) -> ExactnessDifference:
    """Of the [positions, vocabulary] log-probs of each sequence; that of the worst sequence."""
    plain = torch.cat(list(wanted))
    spread = (plain - plain.mean(-1, keepdim=True)).square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    robust = model.dtype != torch.float32 or is_mixture(model)
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        errors = (ours - theirs).square().mean(-1).sqrt() / spread
        if not bool(errors.isfinite().all()):
            worst = float("inf")
        worst = max(worst, float(errors.median() if robust else errors.max()))
    return ExactnessDifference(worst, TOLERANCE[str(model.dtype).removeprefix("torch.")])


def is_mixture(model: Any) -> bool:
    """It sends tokens to experts."""
    return any("expert" in name for name, _ in model.named_modules())


def refusal(model: Any, purpose: str, how: str, outcome: ExactnessDifference | Exception) -> ModelError:
    """The one sentence about a model that can't be used."""
    name = type(model).__name__
    if isinstance(outcome, ModelError):
        return ModelError(f"{name} can't be used for {purpose}: {outcome}")
    if isinstance(outcome, Exception):
        said = str(outcome).strip().splitlines()
        return ModelError(
            f"{name} can't be used for {purpose}: {how} fails with {type(outcome).__name__}"
            + (f" ({said[0][:200]})" if said else "")
        )
    return ModelError(
        f"{name} can't be used for {purpose}: with {how} its log-probs differ from those of a plain transformers "
        f"forward pass by {outcome.share:.2g} of their spread, and at most {outcome.allowed:g} can be rounding"
    )


def shared_copy(model: Any) -> Any:
    """A copy of the module with the same parameters; nothing of the weights is copied."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def attention_of(model: Any) -> str:
    """The attention implementation of the language model: that of a model for several media may have others besides."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def set_attention(model: Any, name: str) -> None:
    """Switch to an attention implementation. A module that has one only keeps it; there is nothing to warn of, since
    what it computes is compared."""
    if attention_of(model) == name:
        return
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model.set_attn_implementation(name)
    finally:
        transformers.logging.set_verbosity(before)


@contextlib.contextmanager
def failures_as(outcomes: list[Exception]) -> Iterator[None]:
    """Keep what a module raises, but for a lack of memory, which is nothing that another form of the model mends."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*FAILURES, ValueError, ModelError) as error:
        outcomes.append(error)


def accepts(module: Any, argument: str) -> bool:
    """The module's forward pass names this argument."""
    return argument in inspect.signature(module.forward).parameters


def _special_tokens(config: Any) -> set[int]:
    """All token ids that the config gives a meaning to, its parts included."""
    found: set[int] = set()
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            found |= _special_tokens(part)
        elif name.endswith(("_token_id", "_token_index", "_token_ids")):
            values = value if isinstance(value, list | tuple) else [value]
            found |= {one for one in values if isinstance(one, int)}
    return found
