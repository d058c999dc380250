"""Trajectories made from chunks: the loss mask, the log-probs and the experts stand where training reads them."""

from __future__ import annotations

import numpy as np
import pytest

from dora_rl.core.errors import TrajectoryError
from dora_rl.core.tokens import TokenChunk
from dora_rl.core.trajectory import Trajectory

LAYERS, EXPERTS = 2, 3


def random_response(random: np.random.Generator, *, experts: bool) -> list[TokenChunk]:
    """Chunks of the policy and of its environment by turns, over several attempts."""
    chunks: list[TokenChunk] = []
    for number in range(int(random.integers(1, 7))):
        length = int(random.integers(1, 6))
        sampled = number == 0 or bool(random.random() < 0.7)
        chunks.append(
            TokenChunk.of(
                trajectory=5,
                version=2,
                attempt=number // 2,
                start=chunks[-1].end if chunks else 0,
                tokens=random.integers(0, 1000, length),
                logprobs=-random.random(length) if sampled else None,
                sampled=sampled,
                experts=random.integers(0, 99, (length, LAYERS, EXPERTS)) if experts and sampled else None,
            )
        )
    return chunks


def made(prompt: list[int], chunks: list[TokenChunk]) -> Trajectory:
    return Trajectory.from_chunks(5, 2, prompt, chunks, reward=0.25, stop_reason="length")


@pytest.mark.parametrize("seed", range(50))
def test_every_token_has_the_mask_log_prob_and_experts_of_its_chunk(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 1000, int(random.integers(1, 8))).tolist()
    with_experts = bool(seed % 2)
    chunks = random_response(random, experts=with_experts)
    trajectory = made(prompt, chunks)

    assert trajectory.tokens[: len(prompt)].tolist() == prompt
    assert not trajectory.loss_mask[: len(prompt)].any()
    assert len(trajectory.tokens) == len(prompt) + chunks[-1].end
    assert (trajectory.routed_experts is not None) == with_experts
    expected = np.full((len(trajectory.tokens), LAYERS, EXPERTS), -1)
    for chunk in chunks:
        for index in range(len(chunk)):
            position = len(prompt) + chunk.start + index
            assert trajectory.tokens[position] == chunk.tokens[index]
            assert trajectory.loss_mask[position] == chunk.sampled
            assert trajectory.behaviour_logprobs[position] == chunk.logprobs[index]
            if chunk.experts is not None:
                expected[position - 1] = chunk.experts[index]
    if trajectory.routed_experts is not None:
        assert (trajectory.routed_experts == expected).all()
    assert (trajectory.id, trajectory.version) == (5, 2)
    assert (trajectory.reward, trajectory.stop_reason) == (0.25, "length")


def test_experts_stand_one_token_before_the_token_that_they_produced() -> None:
    experts = np.arange(2 * LAYERS * EXPERTS).reshape(2, LAYERS, EXPERTS)
    routed = made([1, 2, 3], [TokenChunk.of(5, [4, 5], [-1.0, -1.0], version=2, experts=experts)]).routed_experts
    assert routed is not None
    assert (routed[[0, 1, 4]] == -1).all()
    assert (routed[2:4] == experts).all()


def test_a_chunk_without_experts_beside_one_with_them_leaves_minus_one() -> None:
    experts = np.ones((1, LAYERS, EXPERTS))
    chunks = [
        TokenChunk.of(5, [4], [-1.0], version=2, experts=experts),
        TokenChunk.of(5, [6], [-1.0], version=2, start=1),
    ]
    routed = made([1], chunks).routed_experts
    assert routed is not None
    assert routed[:, 0, 0].tolist() == [1, -1, -1]


@pytest.mark.parametrize(
    ("prompt", "chunks", "message"),
    [
        ([], [TokenChunk.of(5, [4], [-1.0], version=2)], "has no prompt"),
        ([1], [TokenChunk.of(6, [4], [-1.0], version=2)], "tokens of trajectory 6"),
        ([1], [TokenChunk.of(5, [4], [-1.0], version=2, start=1)], "starts at token 1 of the response, not 0"),
        ([1], [TokenChunk.of(5, [4], version=2, sampled=False)], "loss_mask selects no token"),
        ([1], [], "loss_mask selects no token"),
        (
            [1],
            [
                TokenChunk.of(5, [4], [-1.0], version=2, experts=np.ones((1, 2, 3))),
                TokenChunk.of(5, [4], [-1.0], version=2, start=1, experts=np.ones((1, 2, 2))),
            ],
            "different numbers of layers or experts",
        ),
    ],
)
def test_chunks_that_contradict_each_other_are_refused(
    prompt: list[int], chunks: list[TokenChunk], message: str
) -> None:
    with pytest.raises(TrajectoryError, match=message):
        made(prompt, chunks)
