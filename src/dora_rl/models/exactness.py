"""Checks, whenever a model is loaded, that this package computes what `transformers` computes.

The reference is the plain forward pass of the same module: eager attention, one sequence at a time, no cache and no
packing. Its log-probs are compared with those of rollout or training for the same tokens, over the whole vocabulary.

Invariants:
- the weights are never copied: the reference is a copy of the module that shares its parameters;
- a model is used only in a form that agrees with the reference; if there is none, a one-sentence error says which model
  it is, what was compared and by how much it differs. An exception in the comparison counts as a disagreement.

The error of a position is the root mean square, over the vocabulary, of the differences between its log-probs, relative
to the spread of the reference's log-probs. It does not depend on how sharp the model's distributions are, so the check
is as strict for an untrained model as for a trained one. The error of a float32 sequence is that of its worst position.
In half precision, and where a rounding error can send a token to other experts, single positions differ by more than
rounding, so the error of a sequence is the median of its positions. The worst sequence decides, since the first one of
a batch can be right when later ones are wrong.
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

# Largest difference that can be rounding, as a share of the spread of the log-probs.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
LENGTHS = (23, 5, 14)
"""Lengths of the compared sequences: they differ, and the longest ones do not fit into one block of the KV cache."""
_PADDING_AT = 5
"""Position of the padding token in the first sequence."""
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError)
"""What a module may raise if it is called in a way it does not support, besides `ValueError` and `ModelError`."""


class ExactnessDifference(NamedTuple):
    """The difference between two sets of log-probs."""

    share: float
    """The difference as a share of the spread of the reference's log-probs."""
    allowed: float
    """The largest share that can be rounding."""

    @property
    def exact(self) -> bool:
        return self.share <= self.allowed  # false for NaN


def probe_sequences(model: Any, longest: int) -> list[list[int]]:
    """Sequences of random ordinary tokens, one of them with the padding token inside.

    A policy may sample the padding token too, and a module that derives positions from it is not exact then. Tokens
    that stand for images and other media are left out: they mean nothing without the media.
    """
    special = _special_tokens(model.config)
    vocabulary = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    ordinary = np.setdiff1d(np.arange(vocabulary), sorted(special))
    if not len(ordinary):
        raise ModelError(f"the vocabulary of {type(model).__name__} has special tokens only")
    random = np.random.default_rng(0)
    sequences: list[list[int]] = [random.choice(ordinary, min(length, longest)).tolist() for length in LENGTHS]
    padding = model.config.get_text_config().pad_token_id
    if isinstance(padding, int) and 0 <= padding < vocabulary and len(sequences[0]) > _PADDING_AT + 1:
        sequences[0][_PADDING_AT] = padding
    return sequences


@torch.no_grad()
def reference(model: Any, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] float32 log-probs of each sequence from the plain forward pass."""
    plain = shared_copy(model)
    plain.eval()
    set_attention(plain, "eager")
    logprobs = []
    for sequence in sequences:
        ids = torch.tensor([list(sequence)], device=model.device)
        logprobs.append(plain(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1))
    return logprobs


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor], model: Any) -> ExactnessDifference:
    """The difference of the worst sequence, from the [positions, vocabulary] log-probs of each sequence."""
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
    """Whether the model is a mixture of experts."""
    return any("expert" in name for name, _ in model.named_modules())


def refusal(model: Any, purpose: str, how: str, outcome: ExactnessDifference | Exception) -> ModelError:
    """The error about a model that can't be used, in one sentence."""
    name = type(model).__name__
    if isinstance(outcome, ModelError):
        return ModelError(f"{name} can't be used for {purpose}: {outcome}")
    if isinstance(outcome, Exception):
        lines = str(outcome).strip().splitlines()
        return ModelError(
            f"{name} can't be used for {purpose}: {how} fails with {type(outcome).__name__}"
            + (f" ({lines[0][:200]})" if lines else "")
        )
    return ModelError(
        f"{name} can't be used for {purpose}: with {how} its log-probs differ from those of a plain transformers "
        f"forward pass by {outcome.share:.2g} of their spread, and at most {outcome.allowed:g} can be rounding"
    )


def shared_copy(model: Any) -> Any:
    """A copy of the module that shares its parameters; no weights are copied."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def attention_of(model: Any) -> str:
    """The attention implementation of the language model; a multimodal model may have others for its other encoders."""
    name: str = model.config.get_text_config()._attn_implementation
    return name


def set_attention(model: Any, name: str) -> None:
    """Switch to an attention implementation. A module with only one implementation keeps it; the warning about that is
    suppressed, since its results are compared anyway."""
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
    """Collect what a module raises. Out of memory is raised further: another form of the model would not help."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*FAILURES, ValueError, ModelError) as error:
        outcomes.append(error)


def accepts(module: Any, argument: str) -> bool:
    """Whether the module's forward pass has this argument."""
    return argument in inspect.signature(module.forward).parameters


def _special_tokens(config: Any) -> set[int]:
    """All token ids to which the config or one of its sub-configs gives a meaning."""
    special: set[int] = set()
    for name, value in config.to_dict().items():
        sub_config = getattr(config, name, None)
        if hasattr(sub_config, "to_dict"):
            special |= _special_tokens(sub_config)
        elif name.endswith(("_token_id", "_token_index", "_token_ids")):
            values = value if isinstance(value, list | tuple) else [value]
            special |= {token for token in values if isinstance(token, int)}
    return special
