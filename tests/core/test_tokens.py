"""Token chunks: joining loses and reorders nothing, and the wire form is exact."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core.tokens import TokenChunk, joined

LAYERS, EXPERTS = 2, 3


@st.composite
def chunk_lists(draw: st.DrawFn) -> list[TokenChunk]:
    """Chunks of a few trajectories: some continue the one before, some differ in any field that must not be joined."""
    chunks: list[TokenChunk] = []
    for number in range(draw(st.integers(0, 8))):
        changed = draw(st.sets(st.sampled_from(["trajectory", "attempt", "version", "start", "sampled"]), max_size=2))
        before = chunks[-1] if chunks else None
        if before is None or draw(st.booleans()):
            changed = set()
        fields: dict[str, Any] = {
            "trajectory": before.trajectory if before else 0,
            "attempt": before.attempt if before else 0,
            "version": before.version if before else 0,
            "start": before.end if before else 0,
            "sampled": before.sampled if before else draw(st.booleans()),
        }
        for name in changed:
            fields[name] = not fields[name] if name == "sampled" else fields[name] + 1
        chunks.append(random_chunk(np.random.default_rng(number), draw, fields))
    return chunks


def random_chunk(random: np.random.Generator, draw: st.DrawFn, fields: dict[str, Any]) -> TokenChunk:
    length = draw(st.integers(1, 4))
    with_experts, with_model_logprobs, with_prompt_experts = (draw(st.booleans()) for _ in range(3))
    experts = random.integers(0, 99, (length, LAYERS, EXPERTS)) if with_experts else None
    prompt_experts = random.integers(-1, 99, (5, LAYERS, EXPERTS)) if with_prompt_experts else None
    return TokenChunk.of(
        tokens=random.integers(0, 50_000, length),
        logprobs=-random.random(length),
        model_logprobs=-random.random(length) if with_model_logprobs else None,
        experts=experts,
        prompt_experts=prompt_experts,
        **fields,
    )


def per_token(chunks: list[TokenChunk]) -> list[tuple[Any, ...]]:
    """Everything that a chunk says about each of its tokens, token by token."""
    return [
        (
            (chunk.trajectory, chunk.attempt, chunk.version, chunk.sampled, chunk.start + index),
            (int(chunk.tokens[index]), float(chunk.logprobs[index])),
            None if chunk.experts is None else chunk.experts[index].tolist(),
            float(chunk.model_logprobs[index]) if len(chunk.model_logprobs) else None,
        )
        for chunk in chunks
        for index in range(len(chunk))
    ]


@given(chunk_lists())
def test_joining_keeps_every_token_with_its_log_prob_experts_and_origin_in_order(chunks: list[TokenChunk]) -> None:
    assert per_token(list(joined(chunks))) == per_token(chunks)


@given(chunk_lists())
def test_joining_keeps_the_experts_of_prompts(chunks: list[TokenChunk]) -> None:
    recorded = [(chunk.start, chunk.prompt_expert_data) for chunk in chunks if chunk.prompt_expert_data]
    after = [(chunk.start, chunk.prompt_expert_data) for chunk in joined(chunks) if chunk.prompt_expert_data]
    assert after == recorded


@given(chunk_lists())
def test_joining_again_changes_nothing(chunks: list[TokenChunk]) -> None:
    once = list(joined(chunks))
    assert list(joined(once)) == once


def test_consecutive_chunks_become_one() -> None:
    chunks = [TokenChunk.of(7, [1, 2], [-0.5, -1.0], version=3), TokenChunk.of(7, [3], [-2.0], version=3, start=2)]
    assert list(joined(chunks)) == [TokenChunk.of(7, [1, 2, 3], [-0.5, -1.0, -2.0], version=3)]


def test_chunks_are_never_joined_across_a_version_an_origin_an_attempt_a_trajectory_or_a_gap() -> None:
    first = TokenChunk.of(7, [1, 2], [-0.5, -1.0], version=3, attempt=1)
    following = TokenChunk.of(7, [3], [-2.0], version=3, attempt=1, start=2)
    assert len(list(joined([first, following]))) == 1
    changes: dict[str, Any] = {"version": 4, "sampled": False, "attempt": 2, "trajectory": 8, "start": 3}
    for field, value in changes.items():
        other = msgspec.structs.replace(following, **{field: value})
        assert list(joined([first, other])) == [first, other], field


def test_a_chunk_with_experts_is_not_joined_to_one_without() -> None:
    first = TokenChunk.of(7, [1], [-0.5], version=3, prompt_experts=np.ones((4, LAYERS, EXPERTS)))
    following = TokenChunk.of(7, [2], [-0.5], version=3, start=1, experts=np.ones((1, LAYERS, EXPERTS)))
    assert list(joined([first, following])) == [first, following]


@given(chunk_lists())
def test_chunks_survive_the_wire(chunks: list[TokenChunk]) -> None:
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(chunks), type=list[TokenChunk])
    assert received == chunks
    assert per_token(received) == per_token(chunks)


@given(chunk_lists())
def test_chunks_for_training_keep_what_is_trained_and_nothing_else(chunks: list[TokenChunk]) -> None:
    for chunk in chunks:
        kept = chunk.for_training()
        assert kept.prompt_experts is None
        assert not len(kept.model_logprobs)
        without = msgspec.structs.replace(chunk, model_logprob_data=b"", prompt_expert_data=b"")
        assert kept == without


def test_tokens_of_the_environment_have_log_probs_of_zero() -> None:
    chunk = TokenChunk.of(7, [1, 2, 3], version=3, sampled=False)
    assert chunk.logprobs.tolist() == [0.0, 0.0, 0.0]


def test_the_views_are_read_only() -> None:
    chunk = TokenChunk.of(7, [1], [-0.5], version=3, experts=np.ones((1, LAYERS, EXPERTS)))
    assert chunk.experts is not None
    for array in (chunk.tokens, chunk.logprobs, chunk.experts):
        assert not array.flags.writeable
