"""The probe has the same sequences on every machine, and its comparison reports the largest difference."""

from __future__ import annotations

import math

import pytest

from dora_rl.core.errors import ProbeError
from dora_rl.core.probe import LENGTHS, MEDIAN_TOLERANCE, TOLERANCE, Probe, ProbeResult, sequences


def test_the_sequences_are_the_same_on_every_machine() -> None:
    made = sequences(7, 50_000, 4096)
    assert tuple(map(len, made)) == LENGTHS
    assert made[0] == (47091, 14952, 8487)


def test_another_seed_gives_other_sequences() -> None:
    assert sequences(0, 50_000, 4096) != sequences(1, 50_000, 4096)


def test_a_short_context_clips_the_end_only() -> None:
    whole, clipped = sequences(3, 96, 4096), sequences(3, 96, 5)
    assert [len(one) for one in clipped] == [3, 5, 5, 5]
    assert all(long[: len(short)] == short for long, short in zip(whole, clipped, strict=True))
    assert sequences(3, 96, 1) == ()


def test_every_token_is_in_the_vocabulary() -> None:
    for vocabulary in (1, 2, 3, 1000):
        assert all(0 <= token < vocabulary for one in sequences(0, vocabulary, 64) for token in one)


LOGPROBS = ((-1.0, -2.0), (-0.5, -3.0, -4.0))


def probe(dtype: str = "float32", firm: tuple[int, ...] = (2, 3)) -> Probe:
    return Probe(tokens=((1, 2, 3), (4, 5, 6, 7)), logprobs=LOGPROBS, firm=firm, dtype=dtype)


def compared(
    made: Probe, differences: dict[tuple[int, int], float], dtype: str = "float32", tolerance: float | None = None
) -> ProbeResult:
    """Compare log-probs that differ at these (sequence, index) positions."""
    found = [list(one) for one in LOGPROBS]
    for (sequence, index), difference in differences.items():
        found[sequence][index] += difference
    return made.compare(found, dtype=dtype, tolerance=tolerance, slot="i0/0", version=3)


@pytest.mark.parametrize("position", [(0, 0), (0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("difference", [1.1e-3, -1.1e-3, math.nan, math.inf])
def test_a_log_prob_outside_the_tolerance_is_an_error(position: tuple[int, int], difference: float) -> None:
    with pytest.raises(ProbeError, match=rf"version 3: .*sequence {position[0]}, token {position[1] + 1}"):
        compared(probe(), {position: difference, (1, 1): 0.9e-3})


@pytest.mark.parametrize(("trainer", "slot"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "int3")])
def test_the_coarser_dtype_determines_the_tolerance(trainer: str, slot: str) -> None:
    allowed = TOLERANCE["bfloat16"]
    result = compared(probe(trainer), {(0, 1): allowed * 0.9}, slot)
    assert result.tolerance == allowed
    assert result.difference == pytest.approx(allowed * 0.9)
    with pytest.raises(ProbeError, match=f"{allowed} is allowed between {trainer} and {slot}"):
        compared(probe(trainer), {(0, 1): allowed * 1.1}, slot)


def test_a_given_tolerance_replaces_the_default() -> None:
    assert compared(probe(), {(1, 2): 0.4}, tolerance=0.5).tolerance == 0.5
    with pytest.raises(ProbeError):
        compared(probe("bfloat16"), {(1, 2): 0.4}, "bfloat16", tolerance=0.3)


def test_after_a_near_tie_of_experts_the_median_counts() -> None:
    made = probe(firm=(2, 1))
    assert compared(made, {(1, 1): 5.0, (1, 2): 5.0}).tolerance in (TOLERANCE["float32"], MEDIAN_TOLERANCE["float32"])
    with pytest.raises(ProbeError):
        compared(made, {(1, 0): 2e-3})  # a firm log-prob
    everywhere = {(0, 0): 0.2, (0, 1): 0.2, (1, 0): 0.2, (1, 1): 0.2, (1, 2): 0.2}
    with pytest.raises(ProbeError):
        compared(probe(firm=(0, 0)), everywhere)
