"""`Trajectory.from_chunks` gives what the trainer worker makes from its own message."""

from __future__ import annotations

import numpy as np
import pytest

from dora_rl.core.trajectory import Trajectory
from dora_rl.runtime.transport import messages as m
from dora_rl.runtime.workers.trainer import group
from tests.core.test_trajectory import EXPERTS, LAYERS, random_response


@pytest.mark.parametrize("seed", range(100))
def test_from_chunks_agrees_with_the_trainer_worker(seed: int) -> None:
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 1000, int(random.integers(1, 8))).astype(np.int32)
    with_experts = bool(seed % 2)
    chunks = random_response(random, experts=with_experts)
    observed = np.concatenate([np.full(len(chunk), not chunk.sampled) for chunk in chunks])
    message = m.TrainedTrajectory(
        id=5,
        version=2,
        prompt=prompt.tobytes(),
        response=b"".join(chunk.token_data for chunk in chunks),
        logprobs=b"".join(chunk.logprob_data for chunk in chunks),
        observed=observed.tobytes() if observed.any() else b"",
        reward=0.5,
        stop_reason="stop",
        experts=b"".join(chunk.expert_data for chunk in chunks),
        experts_shape=(LAYERS, EXPERTS) if with_experts else (0, 0),
    )
    expected = group(m.TrainedGroup(id=2, trajectories=(message,))).trajectories[0]
    found = Trajectory.from_chunks(5, 2, prompt, chunks, 0.5, "stop")
    for name in Trajectory.__struct_fields__:
        one, other = getattr(expected, name), getattr(found, name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, name
            assert np.array_equal(one, other), name
        else:
            assert one == other, name
